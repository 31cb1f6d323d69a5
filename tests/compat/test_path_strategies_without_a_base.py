"""Strategies of Megatron's kind since 0.19: plain classes that save to a directory, or load from one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.compat.megatron import dist_checkpointing as dc
from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.compat.megatron.dist_checkpointing.strategies import base, fully_parallel
from shardckpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, PluginError, StrategyMismatchError
from tests.damage import flip
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _write(directory: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        torch.save(value, directory / f"{name.replace('/', '-')}.pt")


class _Save:
    """A file an item."""

    backend, version = "files", 2

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        main = {name: one.data for name, one in sharded_state_dict.items() if is_main_replica(one.replica_id)}
        _write(checkpoint_dir, main)


class _AsyncSave:
    """Plans alone: there is no save."""

    backend, version = "files", 2

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx") -> Any:
        main = {name: one.data for name, one in sharded_state_dict.items() if is_main_replica(one.replica_id)}
        return AsyncRequest(_write, (checkpoint_dir, main), [])


class _Load:
    """Reads them; it has nothing but load."""

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        return {
            name: torch.load(checkpoint_dir / f"{name.replace('/', '-')}.pt", weights_only=True)
            for name in sharded_state_dict
        }


class _Both(_Save, _Load):
    """One object for both."""


class _Default:
    """Says no format."""

    save = _Save.save


def _state(value: float = 1.0) -> dict[str, Any]:
    tensor = ShardedTensor.from_rank_offsets("w", torch.full((4,), value))
    return {"w": tensor, "o": ShardedObject("o", {"seed": 7}, (1,), (0,)), "step": 3}


def _wanted() -> dict[str, Any]:
    return {key: shard.without_data() for key, shard in _state().items() if key != "step"}


def _backend(path: Path) -> tuple[str, int]:
    found = json.loads((path / "metadata.json").read_text())
    return found["sharded_backend"], found["sharded_backend_version"]


def test_a_plain_class_saves_and_loads(tmp_path: Path) -> None:
    """It gets tensors and objects, its files are recorded and checked, and the common state comes back."""
    for saver, loader in ((_Save(), _Load()), (_AsyncSave(), _Load()), (_Both(), _Both())):
        path = tmp_path / type(saver).__name__
        dc.save(_state(2.0), path, saver)
        assert _backend(path) == ("files", 2)
        assert not list(path.glob("objects_*"))
        loaded = dc.load(_wanted(), path, loader)
        assert (loaded["w"].tolist(), loaded["o"], loaded["step"]) == ([2.0] * 4, {"seed": 7}, 3)
        flip(path / "w.pt")
        with pytest.raises(CorruptCheckpointError, match=r"w\.pt"):
            dc.load(_wanted(), path, loader)


def test_one_without_a_format_writes_that_of_megatrons_class(tmp_path: Path) -> None:
    """Without backend and version it writes (torch_dist, 1); a loader with other ones refuses that."""
    dc.save(_state(), tmp_path / "c", _Default())
    assert _backend(tmp_path / "c") == ("torch_dist", 1)
    assert dc.load(_wanted(), tmp_path / "c", _Load())["step"] == 3
    with pytest.raises(StrategyMismatchError, match="files"):
        dc.load(_wanted(), tmp_path / "c", _Both())


def test_the_gate_finds_registered_ones(tmp_path: Path) -> None:
    """Registered for a format, they serve saves by its name and loads by metadata.json."""
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, "files", 2, _Save())
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, "files", 2, _Load())
    dc.save(_state(5.0), tmp_path / "c", ("files", 2))
    assert dc.load(_wanted(), tmp_path / "c")["w"].tolist() == [5.0] * 4
    assert isinstance(base.get_default_strategy(base.StrategyAction.LOAD_SHARDED, "files", 2), _Load)


def test_what_it_cannot_list_is_named(tmp_path: Path) -> None:
    """A checkpoint that Megatron saved, and a loader that lists nothing: the error says which methods would."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "metadata.json").write_text('{"sharded_backend": "files", "sharded_backend_version": 2}')
    with pytest.raises(PluginError, match="_Load has none of load_sharded_metadata, load_tensors_metadata"):
        dc.load(_wanted(), tmp_path / "c", _Load())


def _in_parallel(path: str) -> int:
    written: list[str] = []

    class Save(_AsyncSave):
        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, async_strategy: str = "nvrx") -> Any:
            written.extend(name for name, one in sharded_state_dict.items() if is_main_replica(one.replica_id))
            return super().async_save(sharded_state_dict, checkpoint_dir, async_strategy)

    shards = {
        key: ShardedTensor.from_rank_offsets(key, torch.full((4,), number), replica_id=dist.get_rank())
        for number, key in enumerate("ab")
    }
    saver, queue = fully_parallel.FullyParallelSaveStrategyWrapper(Save()), AsyncCallsQueue()
    queue.schedule_async_request(dc.save(shards, path, saver, async_sharded_save=True))
    queue.close()
    loader = fully_parallel.FullyParallelLoadStrategyWrapper(_Both())
    loaded = dc.load({key: shard.without_data() for key, shard in shards.items()}, path, loader)
    assert [value.tolist() for value in loaded.values()] == [[0] * 4, [1] * 4]
    return len(written)


def test_it_is_wrapped_for_parallel_saves_and_loads(ranks: Ranks, tmp_path: Path) -> None:
    """Below the fully parallel wrappers, in the background too, each rank writes its part of what all have."""
    assert ranks.run(2, _in_parallel, str(tmp_path / "c")) == [1, 1]


class _OneArgument:
    """No strategy: its methods take a path alone."""

    def save(self, path: Any) -> None:
        """Save."""

    def load(self, path: Any) -> None:
        """Load."""


@table("strategy", [_Both, _OneArgument(), object()], ids=["class", "one argument", "no methods"])
def test_what_is_no_strategy_is_refused_by_name(tmp_path: Path, strategy: Any) -> None:
    """A class, and an object without such methods, are errors that name them; nothing is written."""
    name = "_Both is a class: give an instance" if strategy is _Both else type(strategy).__name__
    with pytest.raises(CheckpointingException, match=name):
        dc.save(_state(), tmp_path / "c", strategy)
    assert not list(tmp_path.iterdir())
    dc.save(_state(), tmp_path / "c", _Save())
    with pytest.raises(CheckpointingException, match=name):
        dc.load(_wanted(), tmp_path / "c", strategy)
    for wrapper in (fully_parallel.FullyParallelSaveStrategyWrapper, fully_parallel.FullyParallelLoadStrategyWrapper):
        with pytest.raises(CheckpointingException, match=name):
            wrapper(strategy)
