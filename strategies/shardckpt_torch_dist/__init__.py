"""The format (torch_dist, 1), which Megatron-Core 0.9 to 0.20 and torch.distributed.checkpoint write and read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import lazy_getattr

if TYPE_CHECKING:
    from shardckpt_torch_dist.dcp import CheckpointStorageReader, CheckpointStorageWriter
    from shardckpt_torch_dist.dialects import NestedState
    from shardckpt_torch_dist.load import TorchDistLoadShardedStrategy
    from shardckpt_torch_dist.plan import ShardedLoadPlanner, ShardedSavePlanner, set_rest_value
    from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy

# lazy: a plugin's registration must not import torch
__getattr__ = lazy_getattr(
    __name__,
    {
        "dcp": ("CheckpointStorageReader", "CheckpointStorageWriter"),
        "dialects": ("NestedState",),
        "load": ("TorchDistLoadShardedStrategy",),
        "plan": ("ShardedLoadPlanner", "ShardedSavePlanner", "set_rest_value"),
        "save": ("TorchDistSaveShardedStrategy",),
    },
)

__all__ = [
    "CheckpointStorageReader",
    "CheckpointStorageWriter",
    "NestedState",
    "ShardedLoadPlanner",
    "ShardedSavePlanner",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "set_rest_value",
]
