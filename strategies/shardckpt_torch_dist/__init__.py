"""(torch_dist, 1): what Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint write and read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt_torch_dist.dcp.storage_reader import CheckpointStorageReader
    from shardckpt_torch_dist.dcp.storage_writer import CheckpointStorageWriter
    from shardckpt_torch_dist.load import TorchDistLoadShardedStrategy
    from shardckpt_torch_dist.plan.load_planner import ShardedLoadPlanner
    from shardckpt_torch_dist.plan.save_planner import ShardedSavePlanner
    from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy

_HOMES = {
    "CheckpointStorageReader": "dcp.storage_reader",
    "CheckpointStorageWriter": "dcp.storage_writer",
    "ShardedLoadPlanner": "plan.load_planner",
    "ShardedSavePlanner": "plan.save_planner",
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
