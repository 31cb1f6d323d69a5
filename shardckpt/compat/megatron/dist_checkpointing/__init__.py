"""megatron.core.dist_checkpointing."""

from __future__ import annotations

import importlib
import pkgutil
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

#: Megatron's callers reach modules as attributes of the package.
_MODULES = {module.name for module in pkgutil.iter_modules(__path__)}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
