"""megatron.core.dist_checkpointing.strategies.tensorstore: not here, and the error says what to do."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusal

raise make_refusal(
    __name__,
    "Megatron removed it in 0.16: rewrite the checkpoint as torch_dist with Megatron-Core 0.15, which reads it",
)
