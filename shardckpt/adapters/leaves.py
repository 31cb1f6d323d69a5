"""Describe the leaves of a state dict, of any type, for a save or a load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from shardckpt.adapters.dtensor import LayoutCache, describe_dtensor, get_local_tensor
from shardckpt.adapters.overlapping import describe_overlapping
from shardckpt.adapters.torch_sharded import describe_torch_sharded
from shardckpt.distributed.comm import rank_and_size
from shardckpt.errors import ShardingError
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.state_dict import keep_counter
from shardckpt.tensors.memory import ORDINARY, overlaps_itself
from shardckpt.tensors.torch_private import is_sharded_tensor

if TYPE_CHECKING:
    from shardckpt.mapping.base import Replicated


def describe_tree(value: Any, key: str, replicated: Replicated, *, objects: bool, cache: LayoutCache) -> Any:
    """Return nested dicts and lists with descriptions for leaves; the key of a leaf is its path, joined by dots.

    ``key`` is the path so far. Leaves that are not tensors become replicated objects with ``objects``, else they stay,
    as common state. All leaves of one state dict share a ``cache``: to compute a layout takes longer than all else.
    """
    if isinstance(value, dict):
        parts = {k: describe_tree(v, f"{key}.{k}", replicated, objects=objects, cache=cache) for k, v in value.items()}
        return keep_counter(value, parts)
    if isinstance(value, list):
        return [describe_tree(v, f"{key}.{i}", replicated, objects=objects, cache=cache) for i, v in enumerate(value)]
    if objects or isinstance(value, torch.Tensor):
        return describe_leaf(value, key, replicated, cache=cache)
    return value


def describe_leaf(
    value: Any, key: str, replicated: Replicated, *, cache: LayoutCache | None = None, detached: bool = False
) -> Any:
    """Describe a leaf: a tensor of any kind as its shards, anything else as a replicated object.

    If this rank holds no part of a sharded tensor, it is a LocalNonpersistentObject; if a tensor has several shards, a
    factory. ``replicated`` says whether a save compares the ranks' copies of a leaf that is not sharded, and those on
    other meshes. With ``detached`` a load returns a DTensor detached, as it returns any other tensor. A nested tensor
    is a ShardingError.
    """
    if isinstance(value, DTensor):
        return describe_dtensor(key, value, replicated, cache=cache, detached=detached)
    if type(value) not in ORDINARY and is_sharded_tensor(value):
        return describe_torch_sharded(key, value, replicated)
    if is_lazy(value):
        return ShardedTensorFactory(key, value, _refuse_lazy, _refuse_lazy)
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise ShardingError(
                f"{key!r}: its data is nested, and only dense tensors are stored: give values() and offsets() as "
                "tensors of their own"
            )
        shape = tuple(value.shape)
        # the rank as replica id: the lowest rank that has the key writes it, and rank 0 may not have it
        rank = rank_and_size()[0] if cache is None else cache.rank
        if value.layout is torch.strided and overlaps_itself(value):
            return describe_overlapping(key, value.detach(), replicated, rank)
        offset, grid = (0,) * len(shape), (1,) * len(shape)
        return ShardedTensor.from_box(key, get_local_tensor(value), shape, offset, grid, rank, replicated=replicated)
    return describe_object(value, key, replicated)


def _refuse_lazy(key: str, *_: Any) -> Any:
    raise ShardingError(
        f"{key!r}: a parameter or buffer of a lazy module, which has no values yet: run a forward pass before the save"
    )


def describe_object(value: Any, key: str, replicated: Replicated) -> ShardedObject:
    """Return the description of an object that is equal on all ranks that have it; the lowest rank's is saved."""
    return ShardedObject(key, value, (1,), (0,), rank_and_size()[0], replicated=replicated)


def describe_plain_object(value: Any, key: str, keys: tuple[str, ...] = ()) -> PlainObject:
    """Return the description of an object that stock ``dcp.load`` finds by its keys; the lowest rank's is saved."""
    return PlainObject(key, value, replica_id=rank_and_size()[0], replicated="unchecked", keys=keys)
