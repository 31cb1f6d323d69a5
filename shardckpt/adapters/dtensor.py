"""DTensors as shards: the boxes of the local tensor in the global one, by the mesh and the placements."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.errors import ShardingError
from shardckpt.mapping import LocalNonpersistentObject, ReplicaId, Replicated, ShardedTensor
from shardckpt.planning import HeldBox, Split, compute_local_shape, list_held_boxes, make_empty_box
from shardckpt.tensors import split_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning import Ints


def describe_dtensor(
    key: str, dtensor: DTensor, replicated: Replicated = True
) -> InPlaceFactory | LocalNonpersistentObject:
    """A DTensor as its shards, which a load fills in place and gives back as the DTensor.

    Any number of mesh dimensions may shard, evenly or not, or replicate. The replica is named by the coordinates on
    those that replicate. Where the mesh has not all ranks of the job, other ranks may have a DTensor of the same key
    with a mesh of their own: copies, of which the lowest rank's is the main one. What cannot be described is an error
    when it is saved or loaded, and so the same on every rank.

    Args:
        key: Name of the global tensor.
        dtensor: The tensor. A rank outside its mesh stores nothing of it, and gets it back as it is.
        replicated: Of ShardedTensor, for the copies on other meshes.
    """
    if dtensor.device_mesh.get_coordinate() is None:
        return LocalNonpersistentObject(dtensor)
    build = partial(_build, dtensor, replicated if dtensor.device_mesh.size() < dist.get_world_size() else False)
    return InPlaceFactory(key, dtensor, build, replica_id=_replica(dtensor))


def sharded_tensor_from_dtensor(key: str, dtensor: DTensor) -> ShardedTensor:
    """Describe a DTensor whose local tensor is one box of the global tensor.

    Where copies of the whole mesh exist (a tensor-parallel mesh in every data-parallel rank), the caller must set
    another ``replica_id`` on all but one of them; :func:`to_sharded_state_dict` sees to that.

    Args:
        key: Name of the global tensor.
        dtensor: The tensor; its local tensor is the ``data``, not a copy of it.

    Raises:
        ShardingError: a placement other than Shard, _StridedShard and Replicate, a rank outside the mesh, a local
            tensor of another shape than the placements say, or of several boxes.
    """
    found = _shards(key, dtensor, _local_tensor(dtensor), _replica(dtensor), replicated=False)
    if len(found) > 1:
        raise ShardingError(
            f"DTensor {key!r} has the placements {dtensor.placements}: its local tensor is {len(found)} boxes of the "
            "global tensor; to_sharded_state_dict describes it as so many shards"
        )
    return found[0]


def splits_of(key: str, dtensor: DTensor) -> list[Split]:
    """The steps, left to right, by which this rank's part is cut out of the global tensor.

    Raises:
        ShardingError: a placement other than Shard, _StridedShard and Replicate, or a rank outside the mesh.
    """
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(
            f"DTensor {key!r}: this rank is not in its mesh and holds nothing of it; leave it out on this rank"
        )
    steps = zip(dtensor.placements, dtensor.device_mesh.shape, coordinate, strict=True)
    splits = (_split(key, placement, count, index) for placement, count, index in steps)
    return [split for split in splits if split is not None]


def _split(key: str, placement: Any, count: int, index: int) -> Split | None:
    factor = split_factor(placement)
    if factor is not None or type(placement) is Shard:
        return Split(placement.dim, count, index, factor or 1)
    if isinstance(placement, Replicate):
        return None
    why = "only Shard and Replicate placements are supported"
    if isinstance(placement, Partial):
        why = "its values are still to be reduced; redistribute it to Replicate() or Shard(dim) first"
    raise ShardingError(f"DTensor {key!r} has the placement {placement!r}: {why}")


def _replica(dtensor: DTensor) -> ReplicaId:
    """The coordinates on mesh dimensions that replicate."""
    steps = zip(dtensor.placements, dtensor.device_mesh.get_coordinate() or (), strict=False)
    return tuple(index for placement, index in steps if isinstance(placement, Replicate)) or 0


def _build(
    source: DTensor, replicated: Replicated, key: str, data: torch.Tensor, replica_id: ReplicaId, _: slice | None
) -> list[ShardedTensor]:
    """The shards of ``data``: a DTensor, or a local tensor that lies as that of ``source`` does."""
    if isinstance(data, DTensor):
        return _shards(key, data, _local_tensor(data), replica_id, replicated=replicated)
    return _shards(key, source, data, replica_id, replicated=replicated)


def _shards(
    key: str, dtensor: DTensor, local: torch.Tensor, replica_id: ReplicaId, *, replicated: Replicated
) -> list[ShardedTensor]:
    """A shard for every box of the local tensor; for an empty one, an empty shard."""
    splits, shape = splits_of(key, dtensor), tuple(dtensor.shape)
    extent = compute_local_shape(shape, splits)
    if tuple(local.shape) != extent:
        raise ShardingError(
            f"DTensor {key!r}: the local tensor has shape {tuple(local.shape)}, but its place in the global shape "
            f"{shape} by {dtensor.placements} has {extent}; DTensor.from_local needs shape= and stride= where shards "
            "are uneven"
        )
    held = list_held_boxes(shape, splits) or [HeldBox(make_empty_box(shape, splits), (0,) * len(shape))]
    grid = _grid(shape, splits)
    return [
        ShardedTensor(
            key,
            _part(local, piece),
            local.dtype,
            piece.box.shape,
            shape,
            piece.box.offset,
            grid,
            replica_id,
            replicated=replicated,
        )
        for piece in held
    ]


def _part(local: torch.Tensor, piece: HeldBox) -> torch.Tensor:
    """The piece of the local tensor, as a view; the whole is itself, as wrappers may have no views."""
    if piece.box.shape == tuple(local.shape):
        return local
    return local[tuple(slice(start, start + size) for start, size in zip(piece.place, piece.box.shape, strict=True))]


def _grid(shape: Ints, splits: Sequence[Split]) -> Ints | None:
    """Number of equal pieces along every axis, or None if some axis is split unevenly or in strides."""
    counts = [1] * len(shape)
    for split in splits:
        counts[split.dim] *= split.count
    even = all(size % count == 0 for size, count in zip(shape, counts, strict=True))
    return tuple(counts) if even and all(split.factor == 1 for split in splits) else None


def _local_tensor(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself, outside autograd, once a collective that still fills it has ended."""
    with torch.no_grad():
        local = dtensor.to_local()
    wait = getattr(local, "wait", None)
    return (local if wait is None else wait()).detach()


__all__ = ["describe_dtensor", "sharded_tensor_from_dtensor", "splits_of"]
