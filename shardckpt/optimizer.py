"""Sharded optimizer state: describe it by the model's shards, or load it before the optimizer exists."""

from __future__ import annotations

from shardckpt.adapters.optimizer_loading import load_sharded_optimizer_state_dict
from shardckpt.adapters.optimizer_sharding import (
    KEEP_VARS_HINT,
    get_optim_param_to_id_map,
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
    optim_state_to_sharding_state,
)

__all__ = [
    "KEEP_VARS_HINT",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "load_sharded_optimizer_state_dict",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]
