"""The base of every leaf of a sharded state dict, and the types of state dicts and replica ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch

from shardckpt.errors import show_given

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
ShardedStateDict: TypeAlias = dict[str, Any]
ReplicaId: TypeAlias = int | tuple[int, ...]
#: Whether the library finds out which ranks have the same shard, and chooses the main replica; see ShardedTensor.
Replicated: TypeAlias = bool | Literal["unchecked", "sampled"]
FactoryBuildFn: TypeAlias = Callable[[str, torch.Tensor, ReplicaId, "slice | None"], Any]
FactoryMergeFn: TypeAlias = Callable[[Any], torch.Tensor]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether this replica is the one that is written: 0, or a tuple of zeros."""
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(part == 0 for part in replica_id)


def find_name_fault(shard: ShardedBase) -> str:
    """Return the fault of the key or the replica id of a shard; ``""`` if there is none."""
    key: object = shard.key
    parts: Any = shard.replica_id if isinstance(shard.replica_id, (tuple, list)) else (shard.replica_id,)
    if not isinstance(key, str):
        return f"key is {show_given(key)}, expected the name of the global tensor or object"
    if not all(hasattr(part, "__index__") for part in parts):  # "0" was no main replica
        return f"replica_id is {show_given(shard.replica_id)}, expected an integer or a tuple of integers"
    return ""


def make_plain_key(key: Any) -> Any:
    """Return the text of a key of a subclass of str: a member of an enum is formatted as its name, or as its value."""
    return str.__str__(key) if isinstance(key, str) else key  # any other is refused by find_name_fault


class ShardedBase(ABC):
    """A leaf of a sharded state dict: one shard of a global tensor or object."""

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Raise :class:`ShardingError` if the description contradicts itself."""

    @abstractmethod
    def without_data(self) -> ShardedBase:
        """Return the same description with ``data=None``."""
