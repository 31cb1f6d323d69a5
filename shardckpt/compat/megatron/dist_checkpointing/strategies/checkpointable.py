"""megatron.core.dist_checkpointing.strategies.checkpointable."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.compat.megatron.torch_shards import CheckpointableShardedTensor, LocalShardsContainer

__getattr__ = make_refusing_getattr(__name__)

__all__ = ["CheckpointableShardedTensor", "LocalShardsContainer"]
