"""The format (torch_dist, 1), which Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint write and read."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt_torch_dist.archive import load_bytes
    from shardckpt_torch_dist.dcp import CheckpointStorageReader, CheckpointStorageWriter
    from shardckpt_torch_dist.load import TorchDistLoadShardedStrategy
    from shardckpt_torch_dist.plan import ShardedLoadPlanner, ShardedSavePlanner, set_rest_value
    from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy

#: The module of each name. It is imported when the name is first used: importing the package does not import torch.
_MODULES = {
    "CheckpointStorageReader": "dcp",
    "CheckpointStorageWriter": "dcp",
    "ShardedLoadPlanner": "plan",
    "ShardedSavePlanner": "plan",
    "TorchDistLoadShardedStrategy": "load",
    "TorchDistSaveShardedStrategy": "save",
    "load_bytes": "archive",
    "set_rest_value": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


__all__ = [
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
    "ShardedLoadPlanner",
    "ShardedSavePlanner",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "load_bytes",
    "set_rest_value",
]
