"""megatron.core.dist_checkpointing.strategies.zarr: not here, and the error says what to do."""

from __future__ import annotations

raise ImportError(
    "shardckpt.compat.megatron has no strategies.zarr: "
    "Megatron removed it in 0.16: rewrite the checkpoint as torch_dist with Megatron-Core 0.15 or older, which reads it"
)
