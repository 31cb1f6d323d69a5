"""Classes that describe this rank's shards of global tensors and objects: Megatron's names, no process group needed."""

from shardckpt.mapping.base import (
    CommonStateDict,
    FactoryBuildFn,
    FactoryMergeFn,
    ReplicaId,
    Replicated,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
from shardckpt.mapping.sharded_tensor import BlockScales, ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject, LocalNonpersitentObject, OptionalEntries, StoredNames

__all__ = [
    "BlockScales",
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "OptionalEntries",
    "PlainObject",
    "ReplicaId",
    "Replicated",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "StoredNames",
    "is_main_replica",
]
