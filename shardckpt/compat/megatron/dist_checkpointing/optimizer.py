"""megatron.core.dist_checkpointing.optimizer."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.optimizer import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)

__getattr__ = make_refusing_getattr(__name__)

__all__ = [
    "KEEP_VARS_HINT",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]
