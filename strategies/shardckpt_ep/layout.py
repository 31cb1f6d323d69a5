"""Layouts: the position of a rank's experts in the tensor of all experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from shardckpt.adapters import get_dtensor_splits
from shardckpt.errors import ShardingError
from shardckpt.planning import Box, HeldBox, Split, compute_local_shape, list_held_boxes, make_empty_box
from shardckpt_ep.meshes import (
    EP_NAMES,
    FSDP_NAMES,
    find_mesh_dim,
    get_local_tensor,
    get_outer_replica_coordinates,
    get_replica_coordinates,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from shardckpt.planning import Ints
    from shardckpt_ep.meshes import Names

#: How errors name a tensor for which the caller gives no name.
_NAMELESS = "an expert tensor"


@dataclass(frozen=True)
class ExpertLayout:
    """The position of this rank's tensor in the tensor of all experts.

    Make one with :meth:`from_dtensor`, :meth:`from_efsdp` or :meth:`from_local`. They find this rank by the names of
    mesh dimensions, in any order, and check the tensor's shape against the mesh. None of them is collective.

    Attributes:
        global_shape: Shape of the tensor with all experts.
        block: The box of this rank's experts in it, before FSDP cuts them.
        splits: How the block is cut further, in this order.
        replica: Coordinates on the mesh dimensions that hold copies: the replica id.
        expert_dim: The axis that counts experts.
        inside: Whether this rank is in the mesh; outside it holds nothing.

    Example::

        mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("efsdp", "ep"))
        layout = ExpertLayout.from_local(experts.w1, mesh)  # shape (16, 512, 64) on each of 4 ep ranks
        layout.global_shape  # (64, 512, 64)
    """

    global_shape: Ints
    block: Box
    splits: tuple[Split, ...] = ()
    replica: Ints = ()
    expert_dim: int = 0
    inside: bool = True

    @property
    def num_experts(self) -> int:
        """Number of experts on all ranks."""
        return self.global_shape[self.expert_dim]

    @property
    def local_shape(self) -> Ints:
        """Shape of this rank's tensor."""
        return compute_local_shape(self.block.shape, self.splits)

    def pieces(self) -> list[HeldBox]:
        """Return the boxes of the tensor of all experts that this rank holds.

        Returns:
            Each box in global coordinates with its place in the local tensor. Several where the splits leave a rank
            no contiguous block; none on a rank outside the mesh.
        """
        if not self.inside:
            return []
        found = list_held_boxes(self.block.shape, self.splits)
        return [HeldBox(piece.box.moved(self.block.offset), piece.place) for piece in found]

    def empty(self) -> HeldBox:
        """Return the box that describes a local tensor without elements: an empty one inside the global shape."""
        box = make_empty_box(self.block.shape, self.splits).moved(self.block.offset)
        return HeldBox(box, (0,) * len(box.shape))

    def get_state_layout(self, shape: Ints) -> ExpertLayout | None:
        """Return the layout of a parameter's optimizer state.

        State of the parameter's shape has the parameter's layout. State of size 1 along axes that are not sharded
        (Adafactor's row and column statistics) has the same layout with size 1 there.

        Args:
            shape: Shape of this rank's state tensor.

        Returns:
            The layout, or None for state of any other shape.
        """
        if tuple(shape) == self.local_shape:
            return self
        return self._collapse_axes(self._find_reduced_axes(tuple(shape)))

    @classmethod
    def from_dtensor(cls, dtensor: DTensor, *, expert_dim: int = 0, name: str = _NAMELESS) -> ExpertLayout:
        """Return the layout of a DTensor whose mesh has the expert-parallel dimension: its placements define it.

        Args:
            dtensor: The parameter; its shape counts all experts.
            expert_dim: The axis that counts experts.
            name: Its name, for errors.

        Returns:
            This rank's layout.

        Raises:
            ShardingError: it has a placement other than shard and replicate, or a local tensor of another shape.
        """
        shape = tuple(dtensor.shape)
        axis = _normalize_axis(expert_dim, shape, name)
        if dtensor.device_mesh.get_coordinate() is None:
            return cls(shape, _full_box(shape), expert_dim=axis, inside=False)
        layout = cls(
            shape, _full_box(shape), tuple(get_dtensor_splits(name, dtensor)), get_replica_coordinates(dtensor), axis
        )
        return layout._validate(tuple(get_local_tensor(dtensor).shape), name)

    @classmethod
    def from_efsdp(
        cls,
        dtensor: DTensor,
        mesh: DeviceMesh,
        *,
        ep: Names = EP_NAMES,
        expert_dim: int = 0,
        experts_per_rank: Sequence[int] | None = None,
        global_shape: Sequence[int] | None = None,
        name: str = _NAMELESS,
    ) -> ExpertLayout:
        """Return the layout of a DTensor that holds one rank's experts and is sharded by FSDP alone.

        Expert parallelism cuts first and FSDP cuts each rank's experts, also where both cut the same axis.

        Args:
            dtensor: The parameter; its shape counts this rank's experts, its mesh has no expert-parallel dimension.
            mesh: The mesh with the expert-parallel dimension, with or without other dimensions.
            ep: Name of that dimension.
            expert_dim: The axis that counts experts.
            experts_per_rank: Number of experts of every rank of that dimension. None where all have the same number, or
                where ``global_shape`` is passed and they are split as ``torch.chunk`` does.
            global_shape: Shape with all experts; None to compute it.
            name: Its name, for errors.

        Returns:
            This rank's layout.

        Raises:
            ShardingError: the meshes contradict each other or the tensor's shape.
        """
        if mesh.get_coordinate() is None or dtensor.device_mesh.get_coordinate() is None:
            return cls._of_rank_outside(tuple(dtensor.shape), mesh, dtensor.device_mesh, expert_dim, name)
        ep_dim = find_mesh_dim(mesh, ep)
        replica = (
            *get_replica_coordinates(dtensor),
            *get_outer_replica_coordinates(dtensor.device_mesh, mesh, ep_dim, name),
        )
        experts = _ExpertSplit(mesh, ep_dim, _normalize_axis(expert_dim, dtensor.shape, name), experts_per_rank, name)
        shape, block = experts.locate(tuple(dtensor.shape), global_shape)
        layout = cls(shape, block, tuple(get_dtensor_splits(name, dtensor)), replica, experts.axis)
        if block.shape != tuple(dtensor.shape):
            raise _shape_error(name, tuple(dtensor.shape), block.shape, layout)
        return layout._validate(tuple(get_local_tensor(dtensor).shape), name)

    @classmethod
    def from_local(
        cls,
        tensor: torch.Tensor,
        mesh: DeviceMesh,
        *,
        ep: Names = EP_NAMES,
        fsdp: Names = FSDP_NAMES,
        fsdp_dim: int | None = None,
        expert_dim: int = 0,
        experts_per_rank: Sequence[int] | None = None,
        global_shape: Sequence[int] | None = None,
        name: str = _NAMELESS,
    ) -> ExpertLayout:
        """Return the layout of a plain tensor with this rank's experts, or with FSDP's part of them.

        Mesh dimensions other than these two hold copies. If the mesh lists ranks in another order than the job assigns
        experts, and all parts have the same shape, only a comparison of the copies finds it: see ``check_replicas`` of
        :func:`shardckpt_ep.expert_sharded_state_dict`.

        Args:
            tensor: The local tensor.
            mesh: The mesh with the expert-parallel dimension.
            ep: Name of the dimension whose ranks have different experts.
            fsdp: Name of the dimension whose ranks have parts of the same experts; unused without ``fsdp_dim``.
            fsdp_dim: The axis that FSDP cuts, after the experts were split; None where it cuts none.
            expert_dim: The axis that counts experts.
            experts_per_rank: As in :meth:`from_efsdp`.
            global_shape: As there; needed where FSDP cuts unevenly.
            name: Its name, for errors.

        Returns:
            This rank's layout.

        Raises:
            ShardingError: the mesh lacks a dimension, or contradicts the tensor's shape.
        """
        shape = tuple(tensor.shape)
        here = mesh.get_coordinate()
        if here is None:
            return cls(shape, _full_box(shape), expert_dim=_normalize_axis(expert_dim, shape, name), inside=False)
        ep_dim, uncut = find_mesh_dim(mesh, ep), list(shape)
        used = {ep_dim}
        splits: tuple[Split, ...] = ()
        if fsdp_dim is not None:
            step = find_mesh_dim(mesh, fsdp)
            used.add(step)
            split = Split(_normalize_axis(fsdp_dim, shape, name), mesh.size(step), here[step])
            splits = (split,)
            uncut[split.dim] *= split.count
        experts = _ExpertSplit(mesh, ep_dim, _normalize_axis(expert_dim, shape, name), experts_per_rank, name)
        full_shape, block = experts.locate(tuple(uncut), global_shape)
        replica = tuple(index for dim, index in enumerate(here) if dim not in used)
        layout = cls(full_shape, block, splits, replica, experts.axis)
        return layout._validate(shape, name)

    @classmethod
    def _of_rank_outside(
        cls, shape: Ints, mesh: DeviceMesh, inner: DeviceMesh, expert_dim: int, name: str
    ) -> ExpertLayout:
        """Return the layout of a rank that is in neither of two meshes; raise if it is in one of them."""
        if (mesh.get_coordinate() is None) != (inner.get_coordinate() is None):
            raise ShardingError(
                f"{name!r}: this rank must be in both meshes or in neither: the mesh {mesh.mesh_dim_names} has ranks "
                f"{mesh.mesh.flatten().tolist()}, the tensor's own mesh has ranks {inner.mesh.flatten().tolist()}"
            )
        return cls(shape, _full_box(shape), expert_dim=_normalize_axis(expert_dim, shape, name), inside=False)

    def _validate(self, shape: Ints, name: str) -> ExpertLayout:
        """Return this layout, or raise if the rank's tensor has another shape than it says."""
        if self.inside and shape != self.local_shape:
            raise _shape_error(name, shape, self.local_shape, self)
        return self

    def _find_reduced_axes(self, shape: Ints) -> tuple[int, ...] | None:
        """Return the axes where the state has size 1 and the parameter another; None for any other difference."""
        pairs = list(zip(shape, self.local_shape, strict=False))
        if len(shape) != len(self.local_shape) or any(size not in (1, full) for size, full in pairs):
            return None
        return tuple(axis for axis, (size, full) in enumerate(pairs) if size != full)

    def _collapse_axes(self, axes: tuple[int, ...] | None) -> ExpertLayout | None:
        """Return the layout with size 1 along some axes, or None if one of them is sharded."""
        if axes is None or not self.inside:
            return None
        # Along a sharded axis each rank has its own statistics: size 1 there is not a box of one global tensor.
        if any(self.block.shape[axis] != self.global_shape[axis] for axis in axes):
            return None
        if {split.dim for split in self.splits if split.count > 1} & {*axes} or self.expert_dim in axes:
            return None
        block = Box(self.block.offset, _with_ones(self.block.shape, axes))
        return replace(self, global_shape=_with_ones(self.global_shape, axes), block=block)


class _ExpertSplit:
    """How the expert-parallel mesh dimension splits the experts."""

    def __init__(
        self, mesh: DeviceMesh, ep_dim: int, axis: int, experts_per_rank: Sequence[int] | None, name: str
    ) -> None:
        self.axis = axis
        self._ranks = mesh.size(ep_dim)
        self._rank = (mesh.get_coordinate() or ())[ep_dim]
        self._counts = None if experts_per_rank is None else tuple(experts_per_rank)
        self._name = name
        if self._counts is not None and len(self._counts) != self._ranks:
            raise ShardingError(
                f"{name!r}: experts_per_rank={list(self._counts)} has {len(self._counts)} counts, the expert-parallel "
                f"dimension {self._ranks} ranks"
            )

    def locate(self, uncut: Ints, global_shape: Sequence[int] | None) -> tuple[Ints, Box]:
        """Return the shape with all experts, and this rank's block of it.

        Args:
            uncut: Shape of this rank's experts before FSDP cuts them.
            global_shape: The shape with all experts, if the caller passed it.
        """
        total = uncut[self.axis] * self._ranks if self._counts is None else sum(self._counts)
        shape = _with_size(uncut, self.axis, total) if global_shape is None else tuple(global_shape)
        if len(shape) != len(uncut) or (self._counts is not None and shape[self.axis] != total):
            raise ShardingError(
                f"{self._name!r}: global_shape {shape} does not fit this rank's {uncut}"
                + ("" if self._counts is None else f" and experts_per_rank={list(self._counts)}")
            )
        if self._counts is None:
            split = Split(self.axis, self._ranks, self._rank)
            found = list_held_boxes(shape, [split])
            return shape, found[0].box if found else make_empty_box(shape, [split])  # fewer experts than ranks
        starts = list(accumulate(self._counts, initial=0))
        offset = _with_size((0,) * len(shape), self.axis, starts[self._rank])
        return shape, Box(offset, _with_size(shape, self.axis, self._counts[self._rank]))


def _shape_error(name: str, shape: Ints, expected: Ints, layout: ExpertLayout) -> ShardingError:
    return ShardingError(
        f"{name!r}: this rank's tensor has shape {shape}, but by the mesh it should have {expected}, in {layout.block} "
        f"of the global shape {layout.global_shape}: this is not the mesh that it was sharded on, or ranks have "
        "different numbers of experts (pass experts_per_rank or global_shape)"
    )


def _normalize_axis(axis: int, shape: Sequence[int], name: str) -> int:
    """Return the axis, counted from the front; raise if the shape has no such axis."""
    if not -len(shape) <= axis < len(shape):
        raise ShardingError(f"{name!r}: a tensor of shape {tuple(shape)} has no axis {axis}")
    return axis % len(shape)


def _full_box(shape: Ints) -> Box:
    return Box((0,) * len(shape), shape)


def _with_size(shape: Ints, axis: int, size: int) -> Ints:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _with_ones(shape: Ints, axes: tuple[int, ...]) -> Ints:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


__all__ = ["ExpertLayout"]
