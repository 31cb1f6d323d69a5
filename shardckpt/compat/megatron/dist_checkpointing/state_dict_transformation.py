"""megatron.core.dist_checkpointing.state_dict_transformation: not here, and the error says what to do."""

from __future__ import annotations

raise ImportError(
    "shardckpt.compat.megatron has no state_dict_transformation: "
    "Megatron removed it in 0.10: describe the state dict as it is to be stored"
)
