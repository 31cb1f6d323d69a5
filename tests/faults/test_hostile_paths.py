"""Paths in the ``.metadata`` of a plain DCP directory that contradict each other: damage, by the file's name."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.errors import CorruptCheckpointError
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedObject
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Paths = dict[str, Any]

STATE = {
    "sched": {"a": 1, "b": [2, 3], "t": torch.ones(2)},
    "n": 5,
    "w": torch.ones(3),
    "opt": {"param_groups": [{"lr": 0.1, "params": ["w"]}]},
}


def _save(directory: Path, paths: Paths, state: dict[str, Any] | None = None) -> Path:
    """What DCP saves, with other paths for some keys."""
    dcp.save(STATE if state is None else state, checkpoint_id=directory, no_dist=True)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    metadata.planner_data.update(paths)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    return directory


def _object(key: str) -> ShardedObject:
    return ShardedObject(key, None, (1,), (0,))


class _Schedule:
    """A state of a training."""

    state: Any = None

    def state_dict(self) -> dict[str, Any]:
        """None yet."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it."""
        self.state = state


def _by_manager(directory: Path) -> Any:
    schedule = _Schedule()
    config = CheckpointConfig(folder=str(directory.parent), save_rng=False, load_step=1)
    with CheckpointManager(config, {"sched": schedule}) as manager:
        manager.load()
    return schedule.state


_LOADS: dict[str, Callable[[Path], Any]] = {
    "common state": dc.load_common_state_dict,
    "object": lambda d: dc.load({"sched": _object("sched")}, d, strict="log_all")["sched"],
    "options of a parameter": lambda d: dc.load({"x": _object("opt.param_groups.w")}, d, strict="log_all")["x"],
    "manager": _by_manager,
}


@table("how", _LOADS)
@table(
    ("paths", "said"),
    [
        ({"sched.a": ("sched", "b")}, "'sched.b'"),
        ({"sched.a": ("sched",)}, "'sched'"),
        ({"n": ("sched", "a", "b")}, "'sched.a'"),
        ({"n": ("sched", "a")}, "'n'"),
        ({"n": ("w",)}, "'w'"),
        ({"n": ()}, "'n' cannot be at"),
        ({"n": "sched"}, "'n' cannot be at 'sched'"),
        ({"n": ("sched", 1.5)}, "'n' cannot be at"),
    ],
)
def test_paths_that_contradict_each_other_are_damage(tmp_path: Path, paths: Paths, said: str, how: str) -> None:
    """Two values at one place, or one below another, are never a value that is lost, nor an error of Python's."""
    _save(tmp_path / "step-1", paths)
    with pytest.raises(CorruptCheckpointError) as caught:
        _LOADS[how](tmp_path / "step-1")
    assert said in str(caught.value)


@table("path", [("sched", "a"), ("sched", "b", 0), ("q",), ("sched", "b", 1 << 40)])
def test_a_tensor_is_at_its_key(tmp_path: Path, path: tuple[Any, ...]) -> None:
    """A tensor whose path is another one's, or is not its key, takes no other value's place."""
    _save(tmp_path / "step-1", {"sched.t": path})
    found = _LOADS["object"](tmp_path / "step-1")
    assert torch.equal(found.pop("t"), torch.ones(2))
    assert found == {"a": 1, "b": [2, 3]}


@table("empty", [{}, []])
def test_what_is_empty_on_one_rank_is_no_contradiction(tmp_path: Path, empty: Any) -> None:
    """Where a rank saved an empty dict or list and another one saved values below it, the values are there."""
    state = {"sched": empty, "sched.a": 1, "sched.t": torch.ones(2), "n": 5}
    paths = {"sched.a": ("sched", "a"), "sched.t": ("sched", "t")}
    directory = _save(tmp_path / "step-1", paths, state)
    found = _LOADS["object"](directory)
    assert torch.equal(found.pop("t"), torch.ones(2))
    assert found == {"a": 1}
    assert _LOADS["common state"](directory) == {"sched": {"a": 1}, "n": 5}
