"""megatron.core.dist_checkpointing."""

from __future__ import annotations

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
from shardckpt.compat.megatron.refusals import make_importing_getattr

__getattr__ = make_importing_getattr(__name__, __path__)

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
