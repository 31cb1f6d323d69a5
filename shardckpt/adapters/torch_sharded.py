"""ShardedTensors of torch's (FSDP1's, also over tensor parallelism's) as shards."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import sharded_tensor_from_dtensor
from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.errors import ShardingError
from shardckpt.mapping import LocalNonpersistentObject, ReplicaId, Replicated, ShardedTensor
from shardckpt.tensors import is_sharded_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardckpt.planning import Ints

#: An offset in the global tensor, and what lies there.
_Part: TypeAlias = "tuple[Ints, torch.Tensor]"


def describe_torch_sharded(
    key: str, value: Any, replicated: Replicated = True
) -> InPlaceFactory | LocalNonpersistentObject:
    """A ShardedTensor of torch's as its local shards, which a load fills in place and gives back as the ShardedTensor.

    Local shards may be ShardedTensors again, in coordinates of their own (FSDP1 over tensor parallelism). Copies that
    other ranks have in a group of their own (hybrid sharding) are copies: the lowest rank's is the main one.

    Args:
        key: Name of the global tensor.
        value: The ShardedTensor; a rank without local shards stores nothing of it, and gets it back as it is.
        replicated: Of our ShardedTensor, for the copies in other groups.
    """
    if not any(True for _ in _parts(key, value)):
        return LocalNonpersistentObject(value)
    return InPlaceFactory(key, value, partial(_build, value, replicated))


def _build(
    source: Any, replicated: Replicated, key: str, data: Any, replica_id: ReplicaId, _: slice | None
) -> list[ShardedTensor]:
    """The shards of ``data``: a ShardedTensor, or a plain tensor that lies as the only shard of ``source`` does."""
    parts = list(_parts(key, data if is_sharded_tensor(data) else source))
    if not is_sharded_tensor(data):
        if len(parts) != 1 or parts[0][1].shape != data.shape:
            raise ShardingError(f"{key!r}: a tensor of shape {tuple(data.shape)} is not its parameter's only shard")
        parts = [(parts[0][0], data.detach())]
    shape = tuple(source.size())
    return [
        ShardedTensor(
            key, local, local.dtype, tuple(local.shape), shape, offset, None, replica_id, replicated=replicated
        )
        for offset, local in parts
    ]


def _parts(key: str, value: Any) -> Iterator[_Part]:
    """The plain tensors of which a ShardedTensor consists on this rank, at their global offsets."""
    for shard in value.local_shards():
        start = tuple(shard.metadata.shard_offsets)
        for offset, local in _parts_of_shard(key, shard.tensor):
            yield tuple(outer + inner for outer, inner in zip(start, offset, strict=True)), local


def _parts_of_shard(key: str, tensor: Any) -> Iterator[_Part]:
    if is_sharded_tensor(tensor):
        yield from _parts(key, tensor)
    elif isinstance(tensor, DTensor):
        part = sharded_tensor_from_dtensor(key, tensor)
        yield part.global_offset, part.data  # type: ignore[misc]
    else:
        yield (0,) * tensor.dim(), tensor.detach()


__all__ = ["describe_torch_sharded"]
