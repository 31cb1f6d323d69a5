"""megatron.core.dist_checkpointing.strategies.zarr: not here, and the error says what to do."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusal

raise make_refusal(
    __name__,
    "Megatron removed it in 0.16. load() reads its checkpoints by itself, with shardckpt_zarr.ZarrLoadShardedStrategy; "
    "save as torch_dist",
)
