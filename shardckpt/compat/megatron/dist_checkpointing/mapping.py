"""megatron.core.dist_checkpointing.mapping."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.mapping.base import (
    CommonStateDict,
    FactoryBuildFn,
    FactoryMergeFn,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject, LocalNonpersitentObject
from shardckpt.state_dict import apply_factories, apply_factory_merges

REFUSED = {
    "_logged_deprecations": "no name here logs a deprecation",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

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
