"""A strategy as it is written for Megatron's base classes, which get a path; and what makes it one of ours."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from shardckpt.compat.megatron.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from shardckpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncRequest
from shardckpt.compat.megatron.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
)
from shardckpt.compat.megatron.path_adapter import adapt_loader, adapt_saver


def _file(shard: ShardedTensor) -> str:
    """A file for each shard, under a name that any key has."""
    return f"shard-{sha256(f'{shard.key} {shard.global_offset} {shard.local_shape}'.encode()).hexdigest()[:24]}.pt"


def _write(directory: Any, tensors: dict[str, tuple[Any, torch.Tensor]]) -> None:
    for name, (place, tensor) in tensors.items():
        torch.save({"place": json.dumps(place), "values": tensor.resolve_conj().resolve_neg()}, Path(directory) / name)


class Save(AsyncSaveShardedStrategy):
    """Writes a file a shard."""

    def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> AsyncRequest:
        """Plan."""
        mine = [shard for shard in sharded_state_dict.values() if is_main_replica(shard.replica_id)]
        tensors = {
            _file(shard): ([shard.key, shard.global_shape, shard.global_offset, shard.prepend_axis_num], shard.data)
            for shard in mine
        }
        return AsyncRequest(_write, (checkpoint_dir, tensors), [])


class Load(LoadShardedStrategy):
    """Reads the files of any number of ranks."""

    def check_backend_compatibility(self, loaded_backend: Any) -> None:
        """Accept one."""
        if loaded_backend != "files":
            raise ValueError(f"reads no {loaded_backend}")

    def check_version_compatibility(self, loaded_version: Any) -> None:
        """Accept one."""
        if loaded_version != 1:
            raise ValueError(f"reads no version {loaded_version}")

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        """Put each shard together from the stored ones."""
        keys = {shard.key for shard in sharded_state_dict.values()}
        stored: dict[str, torch.Tensor] = {}
        for file in sorted(Path(checkpoint_dir).glob("shard-*.pt")):
            found = torch.load(file)
            key, shape, offset, prepended = json.loads(found["place"])
            if key in keys:
                values = found["values"]
                whole = stored.setdefault(key, torch.zeros(shape, dtype=values.dtype))
                extent = (*(1,) * prepended, *values.shape)
                box = tuple(slice(start, start + size) for start, size in zip(offset, extent, strict=True))
                whole[box] = values.reshape(extent)
        return {name: self._cut(shard, stored[shard.key]) for name, shard in sharded_state_dict.items()}

    def load_tensors_metadata(self, checkpoint_dir: Any) -> Any:
        """The adapter's index says it."""
        raise NotImplementedError

    def _cut(self, shard: ShardedTensor, whole: torch.Tensor) -> torch.Tensor:
        extent = (*(1,) * shard.prepend_axis_num, *shard.local_shape)
        box = tuple(slice(start, start + size) for start, size in zip(shard.global_offset, extent, strict=True))
        return whole[box].reshape(shard.local_shape).to(shard.dtype, copy=True)


def make_saver() -> Any:
    """The save strategy, adapted."""
    return adapt_saver(Save("files", 1))


def make_loader() -> Any:
    """The load strategy, adapted."""
    return adapt_loader(Load(), "files", 1)
