"""Describe DTensors as shards: mesh and placements say which boxes of the global tensor the local tensor holds."""

from __future__ import annotations

import math
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardckpt.adapters.in_place import InPlaceFactory
from shardckpt.distributed.comm import rank_and_size
from shardckpt.errors import ShardingError
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.mapping.unstored import LocalNonpersistentObject
from shardckpt.planning.boxes import Box
from shardckpt.planning.placements import HeldBox, Split, compute_local_shape, list_held_boxes, make_empty_box
from shardckpt.tensors.inner import get_values
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.torch_private import read_local_tensor, split_factor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

    from shardckpt.mapping.base import ReplicaId, Replicated
    from shardckpt.planning.boxes import Ints


def describe_dtensor(
    key: str,
    dtensor: DTensor,
    replicated: Replicated = True,
    *,
    cache: LayoutCache | None = None,
    detached: bool = False,
) -> InPlaceFactory | LocalNonpersistentObject:
    """Return a factory of a DTensor's shards, which a load fills in place, and which it resolves to the DTensor itself.

    Any number of mesh dimensions may shard, evenly or not, or replicate. The coordinates on the replicating dimensions
    become the replica id. If the mesh does not span all ranks of the job, other ranks may hold a DTensor of the same
    key on a mesh of their own. These are copies, which ``replicated`` is about, and the lowest rank's is the main one.
    A rank outside the mesh stores nothing of it, and a load returns it unchanged there: it gets a local object.

    Placements that cannot be described raise when the tensor is saved or loaded, not here: only then do all ranks raise
    the same error. With ``detached`` a load returns the DTensor detached.
    """
    common = (cache or LayoutCache()).find(dtensor)
    if common is None:
        return LocalNonpersistentObject(dtensor)
    # a mesh of all ranks names every copy; only copies on other meshes remain to be compared
    build = partial(_build, dtensor, False if common.is_everywhere else replicated, common.cut)
    return InPlaceFactory(key, dtensor, build, replica_id=common.replica_id, detached=detached)


def sharded_tensor_from_dtensor(key: str, dtensor: DTensor) -> ShardedTensor:
    """Return the shard of a DTensor whose local tensor is one box of the global one; ``data`` is no copy of it.

    Where copies of the whole mesh exist (a tensor-parallel mesh in every data-parallel rank), the caller must set
    another ``replica_id`` on all but one of them; :func:`to_sharded_state_dict` sees to that. It is a ShardingError if
    a placement is not Shard, _StridedShard or Replicate, this rank is outside the mesh, or the local tensor has another
    shape than the placements say, or is several boxes of the global one.
    """
    replica_id = get_replica_coordinates(dtensor) or 0
    found = _shards(key, dtensor, get_local_tensor(dtensor), replica_id, replicated=False)
    if len(found) > 1:
        raise ShardingError(
            f"DTensor {key!r} has the placements {dtensor.placements}: its local tensor is {len(found)} boxes of the "
            "global tensor; to_sharded_state_dict describes it as several shards"
        )
    return found[0]


def get_dtensor_splits(key: str, dtensor: DTensor) -> list[Split]:
    """Return the splits that cut this rank's part out of the global tensor: one for each mesh dimension that shards.

    They are in mesh order: each one cuts the part that the one before it left. It is a ShardingError if a placement is
    not Shard, _StridedShard or Replicate, or this rank is outside the mesh.
    """
    coordinate = dtensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ShardingError(
            f"DTensor {key!r}: this rank is not in its mesh and holds no part of it; leave it out on this rank"
        )
    splits = []
    for placement, count, index in zip(dtensor.placements, dtensor.device_mesh.shape, coordinate, strict=True):
        # not isinstance(): _StridedShard derives from Shard in some releases of torch, and cuts otherwise
        factor = 1 if type(placement) is Shard else split_factor(placement)
        if factor is not None:
            splits.append(Split(placement.dim, count, index, factor))  # type: ignore[attr-defined]
        elif not isinstance(placement, Replicate):
            why = "only Shard and Replicate placements are supported"
            if isinstance(placement, Partial):
                why = "its values are still to be reduced; redistribute it to Replicate() or Shard(dim) first"
            raise ShardingError(f"DTensor {key!r} has the placement {placement!r}: {why}")
    return splits


def get_element_range(dtensor: DTensor) -> range | None:
    """Return which elements of the global tensor, in its order, this rank has; None if they do not follow each other.

    It raises as :func:`get_dtensor_splits` does.
    """
    shape = tuple(dtensor.shape)
    cut = _cut(shape, tuple(get_dtensor_splits("", dtensor)))
    box = cut.held[0].box
    if not cut.is_one_box:
        return None
    if box.shape == shape:
        return range(dtensor.numel())
    if box.shape[1:] != shape[1:]:
        return None
    width = math.prod(shape[1:])
    return range(box.offset[0] * width, (box.offset[0] + box.shape[0]) * width)


def get_replica_coordinates(dtensor: DTensor) -> Ints:
    """Return this rank's coordinates on the mesh dimensions that replicate a DTensor; none if no dimension does."""
    here = dtensor.device_mesh.get_coordinate() or ()
    return tuple(index for place, index in zip(dtensor.placements, here, strict=False) if isinstance(place, Replicate))


def to_local(value: Any) -> Any:
    """Return the local tensor of a DTensor, the same object each time; anything else as it is.

    :func:`get_local_tensor` is for values to be stored: it waits for a redistribution, and unwraps.
    """
    return read_local_tensor(value) if isinstance(value, DTensor) else value


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself: detached, in the caller's memory."""
    local: Any = read_local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
    if type(local) not in ORDINARY:
        # a redistribute may still be filling it
        local = get_values(local.wait() if hasattr(local, "wait") else local)
    return local.detach()  # type: ignore[no-any-return]


def make_dtensor(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Ints, stride: Ints | None = None
) -> DTensor:
    """Return a DTensor of a global shape over a local tensor, by default row-major; no rank compares anything."""
    stride = torch.empty(shape, device="meta").stride() if stride is None else stride
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def make_shards(
    key: str,
    local: torch.Tensor,
    pieces: Sequence[HeldBox],
    global_shape: Ints,
    replica_id: ReplicaId,
    *,
    grid: Ints | None = None,
    replicated: Replicated = False,
) -> list[ShardedTensor]:
    """Return one shard for each box of a global tensor that a local tensor consists of; their data are views of it.

    ``pieces`` has the boxes, each with its place in the local tensor. ``grid`` is the number of equal parts along every
    axis of the global tensor; None if it is not cut into equal parts.
    """
    full, shards = Box.from_shape(local.shape), []
    for box, place in pieces:
        part = Box(place, box.shape)
        # all of it is passed as it is: tensor subclasses, such as quantized ones, may not support slicing
        data = local if part == full else local[part.within(full)]
        shards.append(
            ShardedTensor(
                key, data, local.dtype, box.shape, global_shape, box.offset, grid, replica_id, replicated=replicated
            )
        )
    return shards


def _build(
    source: DTensor,
    replicated: Replicated,
    cut: _Cut | None,
    key: str,
    data: torch.Tensor,
    replica_id: ReplicaId,
    _: slice | None,
) -> list[ShardedTensor]:
    """Build the shards of ``data``: a DTensor, or a local tensor with the layout of ``source``, whose cut is given."""
    # optimizer state of a DTensor may be a plain tensor in the DTensor's layout
    if data is not source and isinstance(data, DTensor):
        return _shards(key, data, get_local_tensor(data), replica_id, replicated=replicated)
    local = get_local_tensor(data) if data is source else data
    return _shards(key, source, local, replica_id, replicated=replicated, cut=cut)


def _shards(
    key: str,
    dtensor: DTensor,
    local: torch.Tensor,
    replica_id: ReplicaId,
    *,
    replicated: Replicated,
    cut: _Cut | None = None,
) -> list[ShardedTensor]:
    """Build one shard for each box of the local tensor; an empty local tensor gives one empty shard."""
    shape = tuple(dtensor.shape)
    if cut is None:
        cut = _cut(shape, tuple(get_dtensor_splits(key, dtensor)))
    if local.shape == cut.extent and cut.is_one_box:
        offset = cut.held[0].box.offset
        return [ShardedTensor.from_box(key, local, shape, offset, cut.grid, replica_id, replicated=replicated)]
    if local.shape != cut.extent:
        raise ShardingError(
            f"DTensor {key!r}: the local tensor has shape {tuple(local.shape)}, but {dtensor.placements} of the global "
            f"shape {shape} make it {cut.extent}; pass shape= and stride= to DTensor.from_local where shards are uneven"
        )
    return make_shards(key, local, cut.held, shape, replica_id, grid=cut.grid, replicated=replicated)


class _Cut(NamedTuple):
    """A rank's part of tensors of one shape, cut by the same splits.

    Attributes:
        extent: The shape of the local tensor.
        held: The boxes of the global tensor that it consists of; an empty one if it is empty.
        grid: Number of equal parts along every axis; None if the tensor is not cut into a grid of equal parts.
    """

    extent: Ints
    held: tuple[HeldBox, ...]
    grid: Ints | None

    @property
    def is_one_box(self) -> bool:
        """Whether the local tensor is one box of the global one."""
        return len(self.held) == 1 and self.held[0].box.shape == self.extent


class _CommonLayout(NamedTuple):
    """The common layout of DTensors of one mesh, placements and shape on this rank.

    Attributes:
        replica_id: This rank's coordinates on the mesh dimensions that replicate; 0 if none does.
        is_everywhere: Whether the mesh spans all ranks.
        cut: This rank's part; None if the placements are to be refused when the shards are built.
    """

    replica_id: ReplicaId
    is_everywhere: bool
    cut: _Cut | None


class LayoutCache:
    """Caches the common layout of DTensors: computed once for each mesh, placements and shape.

    To be used within one call: the DTensors keep their meshes alive, whose ids are remembered.
    """

    def __init__(self) -> None:
        self.rank, _ = rank_and_size()
        self._found: dict[tuple[Any, ...], _CommonLayout | None] = {}

    def find(self, dtensor: DTensor) -> _CommonLayout | None:
        """Return the common layout of a DTensor and others; None if this rank is outside its mesh."""
        # not the placements themselves: to hash and compare them takes longer than all else here
        marks = [
            place.dim if type(place) is Shard else Replicate if type(place) is Replicate else f"id {id(place)}"
            for place in dtensor.placements
        ]
        key = (id(dtensor.device_mesh), dtensor.shape, *marks)
        if key not in self._found:
            self._found[key] = _find_common(dtensor)
        return self._found[key]


def _find_common(dtensor: DTensor) -> _CommonLayout | None:
    mesh = dtensor.device_mesh
    if mesh.get_coordinate() is None:
        return None
    cut = None
    with suppress(ShardingError):  # which is to be raised in the save or load, by all ranks
        cut = _cut(tuple(dtensor.shape), tuple(get_dtensor_splits("", dtensor)))
    return _CommonLayout(get_replica_coordinates(dtensor) or 0, mesh.size() >= dist.get_world_size(), cut)


@lru_cache(maxsize=4096)  # the layers of a model have equal shapes, and every save describes all of them anew
def _cut(shape: Ints, splits: tuple[Split, ...]) -> _Cut:
    # every rank stores at least an empty shard, so that all ranks describe the same keys
    held = list_held_boxes(shape, splits) or [HeldBox(make_empty_box(shape, splits), (0,) * len(shape))]
    counts = [1] * len(shape)
    for split in splits:
        counts[split.dim] *= split.count
    even = all(size % count == 0 for size, count in zip(shape, counts, strict=True))
    # strided parts are not contiguous blocks: Megatron's grid of fragments cannot say where they lie
    grid = tuple(counts) if even and all(split.factor == 1 for split in splits) else None
    return _Cut(compute_local_shape(shape, splits), tuple(held), grid)
