"""From torch's own distributed tensors to the vocabulary: DTensors, and state dicts that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardckpt.errors import ShardingError
from shardckpt.mapping import ReplicaId, ShardedStateDict, ShardedTensor
from shardckpt.planning.boxes import Box, Ints

if TYPE_CHECKING:
    from collections.abc import Mapping


def to_sharded_state_dict(state_dict: Mapping[Any, Any], prefix: str = "") -> ShardedStateDict:
    """Describe every tensor of a state dict, so that it can be saved, or loaded in place.

    A DTensor becomes a ShardedTensor over its local tensor; any other tensor one that is whole on every rank, and
    written by rank 0 of the default process group. All else stays: common state, and shards described already.

    Args:
        state_dict: A nest of dicts and lists; it stays as it is.
        prefix: Put before every key as it is: ``"model."``. A key is the path in the nest, joined by dots.

    Raises:
        ShardingError: a DTensor that has no description as one box; see :func:`sharded_tensor_from_dtensor`.
    """
    return {name: _described(value, f"{prefix}{name}") for name, value in state_dict.items()}


def sharded_tensor_from_dtensor(key: str, dtensor: DTensor) -> ShardedTensor:
    """Describe the local tensor of a DTensor: its box in the global tensor, and which replica it is.

    Any number of mesh dimensions may shard or replicate; shards may be uneven or empty. The replica is named by the
    coordinates on the mesh dimensions that replicate. Where copies of the whole mesh exist (a tensor-parallel mesh
    in every data-parallel rank), the caller must set another ``replica_id`` on all but one of them.

    Args:
        key: Name of the global tensor.
        dtensor: The tensor; its local tensor is the ``data``, not a copy of it.

    Raises:
        ShardingError: a placement other than Shard and Replicate, a rank outside the mesh, or a local tensor
            of another shape than the placements say.
    """
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(
            f"DTensor {key!r}: this rank is not in its mesh and holds nothing of it; leave it out on this rank"
        )
    for placement in dtensor.placements:
        _check_placement(key, placement)
    steps = list(zip(dtensor.placements, dtensor.device_mesh.shape, coordinate, strict=True))
    splits = [(place.dim, count, index) for place, count, index in steps if isinstance(place, Shard)]
    replica = tuple(index for place, _, index in steps if isinstance(place, Replicate))
    shape = tuple(dtensor.shape)
    box = _local_box(shape, splits)
    data = _local_tensor(dtensor)
    if tuple(data.shape) != box.shape:
        raise ShardingError(
            f"DTensor {key!r}: the local tensor has shape {tuple(data.shape)}, but its place in the global shape "
            f"{shape} by {dtensor.placements} has {box.shape}; DTensor.from_local needs shape= and stride= where "
            "shards are uneven"
        )
    return ShardedTensor(key, data, data.dtype, box.shape, shape, box.offset, _grid(shape, splits), replica or 0)


def _described(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return {name: _described(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_described(inner, f"{key}.{index}") for index, inner in enumerate(value)]
    if isinstance(value, DTensor):
        return sharded_tensor_from_dtensor(key, value)
    if isinstance(value, torch.Tensor):
        return ShardedTensor.from_rank_offsets(key, value.detach(), replica_id=_default_rank())
    return value


def _default_rank() -> ReplicaId:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _check_placement(key: str, placement: object) -> None:
    if type(placement) in (Shard, Replicate):
        return
    if isinstance(placement, Partial):
        why = "its values are still to be reduced; redistribute it to Replicate() or Shard(dim) first"
    elif type(placement).__name__ == "_StridedShard":  # a subclass of Shard in some releases of torch
        why = "a rank's rows are not one block; redistribute it to Shard placements, left to right, first"
    else:
        why = "only Shard and Replicate placements are supported"
    raise ShardingError(f"DTensor {key!r} has the placement {placement!r}: {why}")


def _local_box(shape: Ints, splits: list[tuple[int, int, int]]) -> Box:
    """The box that remains after the splits (dim, number of pieces, which one), as torch applies them: in order."""
    offset, extent = [0] * len(shape), list(shape)
    for dim, count, index in splits:
        step = -(-extent[dim] // count)  # torch.chunk: full pieces first, the last ones short or empty
        start = min(index * step, extent[dim])
        offset[dim] += start
        extent[dim] = min(step, extent[dim] - start)
    return Box(tuple(offset), tuple(extent))


def _grid(shape: Ints, splits: list[tuple[int, int, int]]) -> Ints | None:
    """Number of equal pieces along every axis, or None if some axis is split unevenly."""
    pieces = [1] * len(shape)
    for dim, count, _ in splits:
        pieces[dim] *= count
    even = all(size % count == 0 for size, count in zip(shape, pieces, strict=True))
    return tuple(pieces) if even else None


def _local_tensor(dtensor: DTensor) -> torch.Tensor:
    """The local tensor itself, outside autograd, once a collective that still fills it has ended."""
    with torch.no_grad():
        local = dtensor.to_local()
    wait = getattr(local, "wait", None)
    return (local if wait is None else wait()).detach()


__all__ = ["sharded_tensor_from_dtensor", "to_sharded_state_dict"]
