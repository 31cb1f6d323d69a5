"""Describe the leaves of a state dict, of any type, for a save or a load."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import describe_dtensor
from shardckpt.adapters.torch_sharded import describe_torch_sharded
from shardckpt.mapping import PlainObject, Replicated, ShardedObject, ShardedTensor
from shardckpt.tensors import is_sharded_tensor


def describe_tree(value: Any, key: str, replicated: Replicated, *, objects: bool) -> Any:
    """Return nested dicts and lists with descriptions for leaves; the key of a leaf is its path, joined by dots.

    ``key`` is the path so far. Leaves that are not tensors become replicated objects with ``objects``, else they stay,
    as common state.
    """
    if isinstance(value, dict):
        return {k: describe_tree(v, f"{key}.{k}", replicated, objects=objects) for k, v in value.items()}
    if isinstance(value, list):
        return [describe_tree(v, f"{key}.{i}", replicated, objects=objects) for i, v in enumerate(value)]
    if objects or isinstance(value, torch.Tensor):
        return describe_leaf(value, key, replicated)
    return value


def describe_leaf(value: Any, key: str, replicated: Replicated) -> Any:
    """Describe a leaf: a tensor of any kind as its shards, anything else as a replicated object.

    Args:
        value: The leaf.
        key: Its key in the checkpoint.
        replicated: ``replicated`` of ShardedTensor, for a leaf that is not sharded, or for copies on other meshes.

    Returns:
        A ShardedTensor, a factory of several, or a ShardedObject; for a sharded tensor of which this rank holds no
        part, a LocalNonpersistentObject.
    """
    if isinstance(value, DTensor):
        return describe_dtensor(key, value, replicated)
    if is_sharded_tensor(value):
        return describe_torch_sharded(key, value, replicated)
    if isinstance(value, torch.Tensor):
        # the rank as replica id: the lowest rank that has the key writes it, and rank 0 may not have it
        return ShardedTensor.from_rank_offsets(key, value.detach(), replica_id=_rank(), replicated=replicated)
    return describe_object(value, key, replicated)


def describe_object(value: Any, key: str, replicated: Replicated) -> ShardedObject:
    """Return the description of an object that is equal on all ranks that have it; the lowest rank's is saved."""
    return ShardedObject(key, value, (1,), (0,), _rank(), replicated=replicated)


def describe_plain_object(value: Any, key: str, keys: tuple[str, ...] = ()) -> PlainObject:
    """Return the description of an object that stock ``dcp.load`` finds by its keys; the lowest rank's is saved.

    Args:
        value: The object.
        key: Its key.
        keys: Others to find it by instead; see :class:`shardckpt.mapping.PlainObject`.
    """
    return PlainObject(key, value, replica_id=_rank(), replicated="unchecked", keys=keys)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
