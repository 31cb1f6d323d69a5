"""Describe torch's ShardedTensors (FSDP1's, also over tensor parallelism) as shards."""

from __future__ import annotations

from functools import partial
from operator import add
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import sharded_tensor_from_dtensor
from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.errors import ShardingError
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject
from shardckpt.tensors.torch_private import is_sharded_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardckpt.mapping.base import ReplicaId, Replicated
    from shardckpt.planning.boxes import Ints

#: An offset in the global tensor, and the plain tensor that begins there.
_Part: TypeAlias = "tuple[Ints, torch.Tensor]"


def describe_torch_sharded(
    key: str, value: Any, replicated: Replicated = True
) -> InPlaceFactory | LocalNonpersistentObject:
    """Return a factory of the shards of torch's ShardedTensor, which a load fills in place and resolves to ``value``.

    Local shards may be ShardedTensors themselves, in their own coordinates (FSDP1 over tensor parallelism). With hybrid
    sharding, the ranks of other groups hold copies, which ``replicated`` is about; the lowest rank's is the main one. A
    rank without local shards stores nothing, and a load returns the tensor unchanged there: it gets a local object.
    """
    if not any(True for _ in _parts(key, value)):
        return LocalNonpersistentObject(value)
    return InPlaceFactory(key, value, partial(_build, value, replicated))


def _build(
    source: Any, replicated: Replicated, key: str, data: Any, replica_id: ReplicaId, _: slice | None
) -> list[ShardedTensor]:
    """Build the shards of ``data``: torch's ShardedTensor, or a plain tensor in place of ``source``'s only shard."""
    parts = list(_parts(key, data if is_sharded_tensor(data) else source))
    if not is_sharded_tensor(data):
        if len(parts) != 1 or parts[0][1].shape != data.shape:
            raise ShardingError(
                f"{key!r}: a tensor of shape {tuple(data.shape)} needs a parameter with one local shard of that shape"
            )
        parts = [(parts[0][0], data.detach())]
    shape = tuple(source.size())
    return [
        ShardedTensor(
            key, local, local.dtype, tuple(local.shape), shape, offset, None, replica_id, replicated=replicated
        )
        for offset, local in parts
    ]


def _parts(key: str, value: Any) -> Iterator[_Part]:
    """Yield the plain tensors that a ShardedTensor has on this rank, with their global offsets."""
    for shard in value.local_shards():
        tensor, start = shard.tensor, tuple(shard.metadata.shard_offsets)
        if is_sharded_tensor(tensor):
            inner = list(_parts(key, tensor))
        elif isinstance(tensor, DTensor):
            part = sharded_tensor_from_dtensor(key, tensor)
            inner = [(part.global_offset, cast("torch.Tensor", part.data))]
        else:
            inner = [((0,) * tensor.dim(), tensor.detach())]
        # an inner shard's offset counts from the outer shard
        yield from ((tuple(map(add, start, offset)), local) for offset, local in inner)
