"""megatron.core.dist_checkpointing.strategies.resharding: not here, and the error says what to do."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusal

raise make_refusal(
    __name__,
    "it is not needed: flattened shards are stored and read at their true shape",
)
