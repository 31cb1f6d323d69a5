"""megatron.core.dist_checkpointing.strategies.checkpointable."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import SAVE_PLANNER, make_refusing_getattr

#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "CheckpointableShardedTensor": SAVE_PLANNER,
    "LocalShardsContainer": SAVE_PLANNER,
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = []
