"""megatron.core.dist_checkpointing.strategies.checkpointable."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import SAVE_PLANNER, make_refusing_getattr

#: What to do instead of Megatron's names that are not here.
REFUSED = dict.fromkeys(("CheckpointableShardedTensor", "LocalShardsContainer"), SAVE_PLANNER)

#: What Megatron's module imports from others.
IMPORTED = {
    "mapping": ("ShardedTensor",),
}

__getattr__ = make_refusing_getattr(__name__, REFUSED, IMPORTED)

__all__ = []
