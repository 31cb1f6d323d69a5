"""A strategy as it is written for Megatron, and a job that uses it: code for megatron.core, which the tests port.

Each main shard is a file ``pieces/<key>/<offset>.pt``, and each rank adds ``shapes_<rank>.json``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue, AsyncRequest
from megatron.core.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    SaveShardedStrategy,
    StrategyAction,
    register_default_strategy,
)

BACKEND = ("pieces", 1)


def _leaves(state: Any) -> Iterator[Any]:
    for value in state.values():
        yield from _leaves(value) if isinstance(value, dict) else [value]


def _file(directory: Any, shard: Any) -> Path:
    return Path(directory) / "pieces" / shard.key / f"{'.'.join(map(str, shard.global_offset))}.pt"


def _box(offset: Any, shape: Any) -> tuple[slice, ...]:
    return tuple(slice(start, start + extent) for start, extent in zip(offset, shape, strict=True))


def _write(directory: Any, tensors: Any, shapes: Any) -> None:
    for path, tensor in tensors.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(tensor, path)
    (Path(directory) / f"shapes_{torch.distributed.get_rank()}.json").write_text(json.dumps(shapes))


def _plan(state: Any, directory: Any) -> tuple[Any, ...]:
    mine = [leaf for leaf in _leaves(state) if is_main_replica(leaf.replica_id)]
    shapes = {leaf.key: [leaf.global_shape, str(leaf.dtype).split(".")[1]] for leaf in mine}
    return directory, {_file(directory, leaf): leaf.data for leaf in mine}, shapes


class Save(SaveShardedStrategy):
    """Saves in the foreground."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """Write this rank's files, and wait for the others."""
        _write(*_plan(sharded_state_dict, checkpoint_dir))
        torch.distributed.barrier()


class AsyncSave(AsyncSaveShardedStrategy):
    """Saves behind the training."""

    finalized = 0

    def finalize(self) -> None:
        """Count, with all ranks."""
        torch.distributed.barrier()
        self.finalized += 1

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Plan."""
        return AsyncRequest(_write, _plan(sharded_state_dict, checkpoint_dir), [self.finalize])


class Load(LoadShardedStrategy):
    """Reads the files of any number of ranks."""

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Accept one."""
        if loaded_backend != BACKEND[0]:
            raise ValueError(f"reads no {loaded_backend}")

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Accept one."""
        if loaded_version != BACKEND[1]:
            raise ValueError(f"reads no version {loaded_version}")

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Read a nested state dict."""
        return {
            name: self.load(leaf, checkpoint_dir) if isinstance(leaf, dict) else self._read(leaf, checkpoint_dir)
            for name, leaf in sharded_state_dict.items()
        }

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        """List what all ranks saved."""
        found = {}
        for file in Path(checkpoint_dir).glob("shapes_*.json"):
            for key, (shape, dtype) in json.loads(file.read_text()).items():
                empty = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                found[key] = ShardedTensor.from_rank_offsets(key, empty).without_data()
        return found

    def _read(self, shard: Any, directory: Any) -> Any:
        stored = torch.zeros(shard.global_shape, dtype=shard.dtype)
        for file in (Path(directory) / "pieces" / shard.key).glob("*.pt"):
            piece = torch.load(file)
            offset = map(int, file.name.removesuffix(".pt").split("."))
            stored[_box(offset, piece.shape)] = piece
        return stored[_box(shard.global_offset, shard.local_shape)].clone()


def _state(value: float) -> Any:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rows = torch.arange(16.0).reshape(8, 2).chunk(world)[rank].clone() + value
    return {
        "layer": {"w": ShardedTensor.from_rank_offsets("layer.w", rows, (0, rank, world))},
        "b": ShardedTensor.from_rank_offsets("b", torch.full((3,), value, dtype=torch.bfloat16), replica_id=rank),
        "step": int(value),
    }


def _wanted() -> Any:
    state = _state(0.0)
    return {"layer": {"w": state["layer"]["w"].without_data()}, "b": state["b"].without_data()}


def _make_folder(path: str) -> None:
    if torch.distributed.get_rank() == 0:
        Path(path).mkdir(exist_ok=True)
    torch.distributed.barrier()


def _register() -> None:
    register_default_strategy(StrategyAction.SAVE_SHARDED, *BACKEND, Save(*BACKEND))
    register_default_strategy(StrategyAction.LOAD_SHARDED, *BACKEND, Load())


def save(path: str, value: str) -> None:
    """Save by the registered strategy."""
    _register()
    _make_folder(path)
    dist_checkpointing.save(_state(float(value)), path, BACKEND)


def save_in_background(path: str, value: str) -> None:
    """Save behind a training that changes the tensors at once."""
    _make_folder(path)
    saver, queue, state = AsyncSave(*BACKEND), AsyncCallsQueue(), _state(float(value))
    queue.schedule_async_request(dist_checkpointing.save(state, path, saver, async_sharded_save=True))
    state["layer"]["w"].data.fill_(-1)
    queue.close()
    assert saver.finalized == 1


def load(path: str, value: str) -> None:
    """Load by the strategy that metadata.json names, and by one that is passed."""
    _register()
    for loaded in (dist_checkpointing.load(_wanted(), path), dist_checkpointing.load(_wanted(), path, Load())):
        assert torch.equal(loaded["layer"]["w"], _state(float(value))["layer"]["w"].data), loaded
        assert loaded["b"].tolist() == [float(value)] * 3
        assert loaded["step"] == int(value)
    assert set(dist_checkpointing.load_tensors_metadata(path, Load())) == {"layer.w", "b"}
    assert dist_checkpointing.load_common_state_dict(path)["step"] == int(value)
    assert dist_checkpointing.serialization.load_sharded_metadata(path)["layer.w"].global_shape == (8, 2)
