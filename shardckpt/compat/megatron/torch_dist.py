"""The (torch_dist, 1) strategies with Megatron's arguments, callable with a path."""

from __future__ import annotations

from typing import Any

import shardckpt_torch_dist
from shardckpt.compat.megatron.abcs import AsyncSaveShardedStrategy, LoadShardedStrategy
from shardckpt.compat.megatron.by_path import LoadsByPath, SavesByPath
from shardckpt.errors import CheckpointingException


class TorchDistSaveShardedStrategy(
    SavesByPath, shardckpt_torch_dist.TorchDistSaveShardedStrategy, AsyncSaveShardedStrategy
):
    """Takes the arguments of :class:`shardckpt_torch_dist.TorchDistSaveShardedStrategy`, and ``cpu_shm_mode=False``."""

    def __init__(self, *args: Any, cpu_shm_mode: bool = False, **kwargs: Any) -> None:
        if cpu_shm_mode:
            raise CheckpointingException(
                "cpu_shm_mode=True: leave it out; AsyncCallsQueue(persistent=True) stages in shared memory"
            )
        super().__init__(*args, **kwargs)


class TorchDistLoadShardedStrategy(LoadsByPath, shardckpt_torch_dist.TorchDistLoadShardedStrategy, LoadShardedStrategy):
    """Takes Megatron's arguments and ignores them: every load reads the metadata once, and never from a cache."""

    def __init__(self, cache_metadata: bool = False, checkpoint_name: str | None = None) -> None:  # noqa: ARG002
        super().__init__()


#: Classes that can be called with a path, by the classes that they extend.
BY_PATH: dict[type[Any], type[Any]] = {
    shardckpt_torch_dist.TorchDistSaveShardedStrategy: TorchDistSaveShardedStrategy,
    shardckpt_torch_dist.TorchDistLoadShardedStrategy: TorchDistLoadShardedStrategy,
}

__all__ = ["BY_PATH", "TorchDistLoadShardedStrategy", "TorchDistSaveShardedStrategy"]
