"""(torch_dist, 1): what Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint write and read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt_torch_dist.load import TorchDistLoadShardedStrategy
    from shardckpt_torch_dist.load_planner import ShardedLoadPlanner
    from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy
    from shardckpt_torch_dist.save_planner import ShardedSavePlanner
    from shardckpt_torch_dist.storage_reader import CheckpointStorageReader
    from shardckpt_torch_dist.storage_writer import CheckpointStorageWriter

_HOMES = {
    "CheckpointStorageReader": "storage_reader",
    "CheckpointStorageWriter": "storage_writer",
    "ShardedLoadPlanner": "load_planner",
    "ShardedSavePlanner": "save_planner",
    "TorchDistLoadShardedStrategy": "load",
    "TorchDistSaveShardedStrategy": "save",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = [
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
    "ShardedLoadPlanner",
    "ShardedSavePlanner",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
]
