from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt.dist_checkpointing import load_common_state_dict
from shardckpt.errors import KeyMismatchError, RankFailedError, ShardingError
from shardckpt.maintenance import convert_checkpoint
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


class Held:
    """A state that is what it was given."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        """It."""
        return self.state

    def load_state_dict(self, state: Any) -> None:
        """Take another."""
        self.state = state


def _loaded(folder: Path, saved: dict[str, Any], live: dict[str, Any]) -> None:
    """Save states, and load them into others of the same names."""
    with CheckpointManager(CheckpointConfig(folder=folder, interval=1), saved) as manager:
        manager.save(1)
    with CheckpointManager(CheckpointConfig(folder=folder), live) as manager:
        assert manager.load()


@table("size", [4, 2], ids=["the same tensor", "a view"])
@table("apart", [False, True], ids=["one state", "two states"])
def test_tensors_that_share_memory_now_and_did_not_when_saved(tmp_path: Path, size: int, apart: bool) -> None:
    """A fresh state whose best and last weights are still one tensor gets both values back, not one of them twice."""
    best, last = torch.arange(4.0), torch.full((size,), 9.0)
    fresh = torch.zeros(4)
    saved = [{"best": best}, {"last": last}] if apart else [{"best": best, "last": last}]
    live = [Held({key: fresh[: len(value)] for key, value in state.items()}) for state in saved]
    names = ("a", "b")
    _loaded(tmp_path, dict(zip(names, map(Held, saved), strict=False)), dict(zip(names, live, strict=False)))
    found = {key: value for held in live for key, value in held.state.items()}
    assert torch.equal(found["best"], best)
    assert torch.equal(found["last"], last)


def test_a_state_that_still_shares_the_models_memory(tmp_path: Path) -> None:
    """Averaged weights that a fresh state takes from the model do not overwrite the model's when they are loaded."""
    model, fresh = torch.nn.Linear(3, 1, bias=False), torch.nn.Linear(3, 1, bias=False)
    average = Held({"weight": torch.full((1, 3), 7.0)})
    taken = Held({"weight": fresh.weight.detach()})
    _loaded(tmp_path, {"model": model, "average": average}, {"model": fresh, "average": taken})
    assert torch.equal(fresh.weight, model.weight)
    assert torch.equal(taken.state["weight"], torch.full((1, 3), 7.0))


def test_a_tensor_whose_elements_share_memory(tmp_path: Path) -> None:
    """A live tensor that overlaps itself gives way to a new one."""
    saved, live = Held({"x": torch.arange(6.0).reshape(2, 3)}), Held({"x": torch.zeros(4).as_strided((2, 3), (1, 1))})
    _loaded(tmp_path, {"a": saved}, {"a": live})
    assert torch.equal(live.state["x"], saved.state["x"])


def test_what_fits_is_loaded_where_it_is(tmp_path: Path) -> None:
    """A live tensor with memory of its own is filled, and no other is made."""
    here = torch.zeros(3)
    live = Held({"x": here})
    _loaded(tmp_path, {"a": Held({"x": torch.ones(3)})}, {"a": live})
    assert torch.equal(here, torch.ones(3))
    assert live.state["x"].data_ptr() == here.data_ptr()


def test_tuples_of_arrays(tmp_path: Path) -> None:
    """A tuple that begins with an array, as no placeholder does, comes back."""
    live = Held(None)
    _loaded(tmp_path, {"a": Held({"x": (np.array([1, 2]), 3, 4)})}, {"a": live})
    assert live.state["x"][0].tolist() == [1, 2]
    assert live.state["x"][1:] == (3, 4)


def test_a_value_that_looks_like_a_placeholder(tmp_path: Path) -> None:
    """A save refuses what a load would take for a tensor."""
    state = Held({"x": ("shardckpt: a tensor", "float32", (2,))})
    refused = pytest.raises(ShardingError, match="stands for a tensor")
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), {"a": state}) as manager, refused:
        manager.save(1)


@table(
    "states",
    [
        {"step": 5},
        {"a": {"b": 1}, "a.b": {"c": 2}},
        {"a": {"b.c": 1}, "a.b": {"c": 2}},
        {"a": {"b": {"c": torch.ones(2)}}, "a.b": {"c": 1}},
        {"a": {"x/shard_y": 1, "x/shard_0_1": 2}},
    ],
    ids=["a value alone", "a state's name", "another state's value", "a tensor", "the name of a grid"],
)
def test_values_whose_keys_are_taken(tmp_path: Path, states: dict[str, Any]) -> None:
    """The names that stock DCP would ask for may be those of other things: such states are saved and loaded as ever."""
    live = {name: Held(None) for name in states}
    _loaded(tmp_path, {name: Held(state) for name, state in states.items()}, live)
    torch.testing.assert_close({name: held.state for name, held in live.items()}, states)


def test_stock_dcp_finds_lists_and_tuples(tmp_path: Path) -> None:
    """A list of plain lists, and a tuple, are one value each to DCP, whatever the tuple has in it."""
    state = {"ranges": [[1, 2], [3]], "pair": (0.9, {"x": 1}), "mixed": [{"y": 2}, 5]}
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), {"a": Held(state)}) as manager:
        manager.save(1)
    wanted = {"a": {"ranges": [], "pair": (), "mixed": [{"y": 0}, 0]}}
    dcp.load(wanted, checkpoint_id=tmp_path / "step-1", no_dist=True)
    assert wanted == {"a": state}


def test_a_state_without_tensors_becomes_a_file_of_torch_save(tmp_path: Path) -> None:
    """Its step has its values under its name, and no empty dict of tensors beside them, for which a file has no place.

    A scheduler's state is such a one.
    """
    states = {"schedule": Held({"last_epoch": 3}), "average": Held({"w": torch.ones(2), "count": 4})}
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), states) as manager:
        manager.save(1)
    assert load_common_state_dict(tmp_path / "step-1").keys() == {"content_metadata"}
    convert_checkpoint(tmp_path / "step-1", tmp_path / "step-1.pt", "torch")
    assert torch.load(tmp_path / "step-1.pt")["schedule"] == {"last_epoch": 3}


def test_a_state_that_contains_itself_is_named(tmp_path: Path) -> None:
    """The error of a save says which of the states cannot be described."""
    graph: dict[str, Any] = {"n": 1}
    graph["self"] = graph
    states = {"fine": Held({"n": 1}), "graph": Held(graph)}
    with (
        CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), states) as manager,
        pytest.raises(RankFailedError, match="in the state 'graph'"),
    ):
        manager.save(1)


def test_a_wrapped_optimizer_has_no_unused_keys(tmp_path: Path) -> None:
    """A wrapper that is no torch optimizer, under the name of one, is all loaded: on_unused='error' finds nothing."""
    state = {"inner": {"state": {0: {"momentum": torch.ones(2)}}, "param_groups": [{"params": [0]}]}, "count": 3}
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), {"optimizer": Held(state)}) as manager:
        manager.save(1)
    live = Held({})
    with CheckpointManager(CheckpointConfig(folder=tmp_path, on_unused="error"), {"optimizer": live}) as manager:
        assert manager.load()
    assert live.state["count"] == 3
    assert live.state["inner"]["state"][0]["momentum"].equal(torch.ones(2))


class _Sharded:
    """Has tensors of these keys, as Megatron's optimizer describes its own."""

    def __init__(self, *keys: str) -> None:
        self._keys = keys

    def sharded_state_dict(self) -> dict[str, Any]:
        """Describe them."""
        return {key: ShardedTensor.from_rank_offsets(f"optimizer.{key}", torch.ones(2)) for key in self._keys}

    def load_state_dict(self, state: Any) -> None:
        """Take them."""


def test_a_sharded_optimizer_has_unused_keys(tmp_path: Path) -> None:
    """An object that describes its own shards, under the name of an optimizer, asks for keys: others are unused."""
    with CheckpointManager(CheckpointConfig(folder=tmp_path, interval=1), {"optimizer": _Sharded("a", "b")}) as manager:
        manager.save(1)
    config = CheckpointConfig(folder=tmp_path, on_unused="error")
    with (
        CheckpointManager(config, {"optimizer": _Sharded("a")}) as manager,
        pytest.raises(KeyMismatchError, match=r"optimizer\.b"),
    ):
        manager.load()
