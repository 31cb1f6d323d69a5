"""megatron.core.dist_checkpointing.strategies.checkpointable."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import SAVE_PLANNER, refusing

#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "CheckpointableShardedTensor": SAVE_PLANNER,
    "LocalShardsContainer": SAVE_PLANNER,
}

__getattr__ = refusing(__name__, REFUSED)

__all__ = []
