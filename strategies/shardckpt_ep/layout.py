"""Layouts: the position of a rank's experts in the tensor of all experts."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardckpt.adapters import get_dtensor_splits, get_local_tensor, get_replica_coordinates
from shardckpt.errors import ShardingError
from shardckpt.planning import Box, HeldBox, Split, compute_local_shape, list_held_boxes, make_empty_box
from shardckpt_ep.meshes import EP_NAMES, FSDP_NAMES, find_mesh_dim, get_outer_replica_coordinates

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
        tied: The first name of a tied parameter, in the layouts of all its names: its optimizer has state under one.

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
    tied: str = ""

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

    def described_pieces(self) -> list[HeldBox]:
        """Return :meth:`pieces`; for a local tensor without elements, an empty box inside the global shape."""
        found = self.pieces()
        if found or not self.inside:
            return found
        # every rank of the mesh describes the key, so that the ranks' keys can be compared
        box = make_empty_box(self.block.shape, self.splits).moved(self.block.offset)
        return [HeldBox(box, (0,) * len(box.shape))]

    def get_state_layout(self, shape: Ints) -> ExpertLayout | None:
        """Return the layout of a parameter's optimizer state.

        State of the parameter's shape has the parameter's layout. State of size 1 along axes that are not sharded
        (Adafactor's row and column statistics) has the same layout with size 1 there.

        Args:
            shape: Shape of this rank's state tensor.

        Returns:
            The layout, or None for state of any other shape.
        """
        own = self.local_shape
        if tuple(shape) == own:
            return self
        if not self.inside or len(shape) != len(own):
            return None
        reduced = {axis for axis, (size, full) in enumerate(zip(shape, own, strict=True)) if size != full}
        if any(shape[axis] != 1 for axis in reduced):
            return None
        # Along a sharded axis each rank has its own statistics: size 1 there is not a box of one global tensor.
        sharded = {axis for axis, size in enumerate(self.block.shape) if size != self.global_shape[axis]}
        sharded |= {split.dim for split in self.splits if split.count > 1} | {self.expert_dim}
        if reduced & sharded:
            return None
        block = Box(self.block.offset, _with_ones(self.block.shape, reduced))
        return replace(self, global_shape=_with_ones(self.global_shape, reduced), block=block)

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
        outside = cls._of_rank_outside(tuple(dtensor.shape), expert_dim, name)
        if dtensor.device_mesh.get_coordinate() is None:
            return outside
        splits = tuple(get_dtensor_splits(name, dtensor))
        layout = replace(outside, splits=splits, replica=get_replica_coordinates(dtensor), inside=True)
        return _check_shape(layout, tuple(get_local_tensor(dtensor).shape), layout.local_shape, name)

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
        inner, uncut = dtensor.device_mesh, tuple(dtensor.shape)
        if (mesh.get_coordinate() is None) != (inner.get_coordinate() is None):
            raise ShardingError(
                f"{name!r}: this rank must be in both meshes or in neither: the mesh {mesh.mesh_dim_names} has ranks "
                f"{mesh.mesh.flatten().tolist()}, the tensor's own mesh has ranks {inner.mesh.flatten().tolist()}"
            )
        if mesh.get_coordinate() is None:
            return cls._of_rank_outside(uncut, expert_dim, name)
        ep_dim, axis = find_mesh_dim(mesh, ep), _normalize_axis(expert_dim, uncut, name)
        replica = get_replica_coordinates(dtensor) + get_outer_replica_coordinates(inner, mesh, ep_dim, name)
        shape, block = _locate_experts(uncut, mesh, ep_dim, axis, experts_per_rank, global_shape, name)
        layout = cls(shape, block, tuple(get_dtensor_splits(name, dtensor)), replica, axis)
        _check_shape(layout, uncut, block.shape, name)
        return _check_shape(layout, tuple(get_local_tensor(dtensor).shape), layout.local_shape, name)

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
            return cls._of_rank_outside(shape, expert_dim, name)
        ep_dim, axis, uncut = find_mesh_dim(mesh, ep), _normalize_axis(expert_dim, shape, name), shape
        splits: dict[int, Split] = {}  # by mesh dimension
        if fsdp_dim is not None:
            dim = find_mesh_dim(mesh, fsdp)
            split = splits[dim] = Split(_normalize_axis(fsdp_dim, shape, name), mesh.size(dim), here[dim])
            uncut = _with_size(shape, split.dim, shape[split.dim] * split.count)
        full_shape, block = _locate_experts(uncut, mesh, ep_dim, axis, experts_per_rank, global_shape, name)
        replica = tuple(index for dim, index in enumerate(here) if dim != ep_dim and dim not in splits)
        layout = cls(full_shape, block, tuple(splits.values()), replica, axis)
        return _check_shape(layout, shape, layout.local_shape, name)

    @classmethod
    def _of_rank_outside(cls, shape: Ints, expert_dim: int, name: str) -> ExpertLayout:
        """Return the layout of a rank that is not in the mesh; the block stands for no data."""
        return cls(shape, Box.from_shape(shape), expert_dim=_normalize_axis(expert_dim, shape, name), inside=False)


def _check_shape(layout: ExpertLayout, shape: Ints, expected: Ints, name: str) -> ExpertLayout:
    """Return the layout, or raise if a shape of the rank's tensor is not the one that the layout implies."""
    if shape != expected:
        raise ShardingError(
            f"{name!r}: this rank's tensor has shape {shape}, but by the mesh it should have {expected}, in "
            f"{layout.block} of the global shape {layout.global_shape}: this is not the mesh that it was sharded on, "
            "or ranks have different numbers of experts (pass experts_per_rank or global_shape)"
        )
    return layout


def _locate_experts(
    uncut: Ints,
    mesh: DeviceMesh,
    ep_dim: int,
    axis: int,
    experts_per_rank: Sequence[int] | None,
    global_shape: Sequence[int] | None,
    name: str,
) -> tuple[Ints, Box]:
    """Return the shape with all experts, and this rank's block of it; ``uncut`` is its shape before FSDP cuts it."""
    counts = None if experts_per_rank is None else [*_read_sizes(experts_per_rank, "experts_per_rank", name)]
    ranks, rank = mesh.size(ep_dim), (mesh.get_coordinate() or ())[ep_dim]
    if counts is not None and len(counts) != ranks:
        raise ShardingError(
            f"{name!r}: experts_per_rank={counts} has {len(counts)} counts, the expert-parallel dimension {ranks} ranks"
        )
    total = uncut[axis] * ranks if counts is None else sum(counts)
    whole = _with_size(uncut, axis, total)
    shape = whole if global_shape is None else _read_sizes(global_shape, "global_shape", name)
    if len(shape) != len(uncut) or (counts is not None and shape[axis] != total):
        raise ShardingError(
            f"{name!r}: global_shape {shape} does not fit this rank's {uncut}"
            + ("" if counts is None else f" and experts_per_rank={counts}")
        )
    if counts is None:
        split = Split(axis, ranks, rank)
        found = list_held_boxes(shape, [split])
        return shape, found[0].box if found else make_empty_box(shape, [split])  # fewer experts than ranks
    offset = _with_size((0,) * len(shape), axis, sum(counts[:rank]))
    return shape, Box(offset, _with_size(shape, axis, counts[rank]))


def _read_sizes(sizes: Sequence[int], what: str, name: str) -> Ints:
    """Return the caller's numbers, also numpy's or torch's, as integers; raise if they are none."""
    try:
        return tuple(map(operator.index, sizes))
    except TypeError as exc:
        raise ShardingError(f"{name!r}: {what}={sizes!r:.80} is no sequence of integers") from exc


def _normalize_axis(axis: int, shape: Sequence[int], name: str) -> int:
    """Return the axis, counted from the front; raise if the shape has no such axis."""
    try:
        axis = operator.index(axis)
    except TypeError as exc:
        raise ShardingError(f"{name!r}: axis {axis!r:.80} is no integer") from exc
    if not -len(shape) <= axis < len(shape):
        raise ShardingError(f"{name!r}: a tensor of shape {tuple(shape)} has no axis {axis}")
    return axis % len(shape)


def _with_size(shape: Ints, axis: int, size: int) -> Ints:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _with_ones(shape: Ints, axes: set[int]) -> Ints:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
