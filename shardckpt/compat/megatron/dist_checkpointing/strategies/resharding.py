"""megatron.core.dist_checkpointing.strategies.resharding: not here, and the error says what to do."""

from __future__ import annotations

raise ImportError(
    "shardckpt.compat.megatron has no strategies.resharding: "
    "it is not needed: flattened shards are stored and read at their true shape"
)
