"""megatron.core.dist_checkpointing.mapping."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.mapping import (
    CommonStateDict,
    FactoryBuildFn,
    FactoryMergeFn,
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ReplicaId,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    is_main_replica,
)
from shardckpt.state_dict import apply_factories, apply_factory_merges

#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "_logged_deprecations": "no name here logs a deprecation",
}

#: What Megatron's module imports from others.
IMPORTED = {
    "core": ("CheckpointingException",),
    "dict_utils": ("dict_list_map_inplace",),
}

__getattr__ = make_refusing_getattr(__name__, REFUSED, IMPORTED)

__all__ = [
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]
