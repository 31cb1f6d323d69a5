"""megatron.core.dist_checkpointing.strategies.two_stage: not here, and the error says what to do."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusal

raise make_refusal(
    __name__,
    "Megatron removed it in 0.16: FullyParallelLoadStrategyWrapper has one rank read and the others receive",
)
