"""megatron.core.dist_checkpointing.state_dict_transformation: not here, and the error says what to do."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusal

raise make_refusal(
    __name__,
    "Megatron removed it in 0.10: describe the state dict as it is to be stored",
)
