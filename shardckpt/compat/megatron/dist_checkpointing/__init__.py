"""megatron.core.dist_checkpointing."""

from __future__ import annotations

import importlib
from typing import Any

from shardckpt.compat.megatron.dist_checkpointing.core import check_is_distributed_checkpoint
from shardckpt.compat.megatron.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedObject,
    ShardedTensor,
)
from shardckpt.compat.megatron.dist_checkpointing.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
)
from shardckpt.compat.megatron.refusals import make_refusing_getattr

#: Modules that Megatron's callers reach as attributes.
_MODULES = (
    "core",
    "dict_utils",
    "exchange_utils",
    "mapping",
    "optimizer",
    "serialization",
    "state_dict_utils",
    "strategies",
    "tensor_aware_state_dict",
    "utils",
    "validation",
)

#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "gpt_checkpoint_interop": "it knows model code; rename keys with utils.apply_prefix_mapping before the load",
    "state_dict_transformation": "Megatron 0.9's name of state_dict_utils",
}

_refused = make_refusing_getattr(__name__, REFUSED)


def __getattr__(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}") if name in _MODULES else _refused(name)


__all__ = [
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedObject",
    "ShardedTensor",
    "check_is_distributed_checkpoint",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
]
