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

#: What to do instead of Megatron's names that are not here.
REFUSED: dict[str, str] = {}

#: What Megatron's module imports from others.
IMPORTED = {
    "dict_utils": ("nested_values",),
    "mapping": ("LocalNonpersistentObject", "ShardedStateDict", "ShardedTensor", "ShardedTensorFactory", "StateDict"),
    "utils": ("extract_sharded_tensors_and_factories",),
}

__getattr__ = make_refusing_getattr(__name__, REFUSED, IMPORTED)

__all__ = [
    "KEEP_VARS_HINT",
    "get_optim_param_to_id_map",
    "get_param_id_to_sharded_param_map",
    "make_sharded_optimizer_tensor",
    "optim_state_to_sharding_state",
]
