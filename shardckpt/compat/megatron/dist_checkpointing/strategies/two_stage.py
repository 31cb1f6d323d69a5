"""megatron.core.dist_checkpointing.strategies.two_stage: not here, and the error says what to do."""

from __future__ import annotations

raise ImportError(
    "shardckpt.compat.megatron has no strategies.two_stage: "
    "Megatron removed it in 0.16: FullyParallelLoadStrategyWrapper has one rank read and the others receive"
)
