"""Where the experts that a rank holds lie in the tensor of all experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from shardckpt.adapters import splits_of
from shardckpt.errors import ShardingError
from shardckpt.planning import Box, HeldBox, Split, compute_local_shape, list_held_boxes, make_empty_box
from shardckpt_ep.meshes import EP_NAMES, FSDP_NAMES, local_of, mesh_dim, replica_inside, replica_outside

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from shardckpt.planning import Ints
    from shardckpt_ep.meshes import Names

#: What a layout's tensor is called in errors where the caller gives no name.
_NAMELESS = "an expert tensor"


@dataclass(frozen=True)
class ExpertLayout:
    """This rank's part of one tensor of experts.

    Made by :meth:`from_dtensor`, :meth:`from_efsdp` or :meth:`from_local`, which find this rank by the names of mesh
    dimensions, in whatever order these are, and check that the tensor is as long as its place.

    Attributes:
        global_shape: Shape of the tensor with all experts.
        block: Where this rank's experts lie in it, as long as nothing else cuts them.
        splits: How the block is cut further, step by step.
        replica: Coordinates on the mesh dimensions that hold copies.
        expert_dim: The axis that counts experts.
        inside: Whether this rank is in the mesh; outside it holds nothing.
    """

    global_shape: Ints
    block: Box
    splits: tuple[Split, ...] = ()
    replica: Ints = ()
    expert_dim: int = 0
    inside: bool = True

    @property
    def num_experts(self) -> int:
        """How many experts there are."""
        return self.global_shape[self.expert_dim]

    @property
    def local_shape(self) -> Ints:
        """Shape of this rank's tensor."""
        return compute_local_shape(self.block.shape, self.splits)

    def pieces(self) -> list[HeldBox]:
        """The boxes of the whole tensor that this rank's consists of, and where they lie in it; none outside."""
        if not self.inside:
            return []
        found = list_held_boxes(self.block.shape, self.splits)
        return [HeldBox(piece.box.moved(self.block.offset), piece.place) for piece in found]

    def empty(self) -> HeldBox:
        """What stands for a tensor without elements: a box without any, inside the whole tensor."""
        box = make_empty_box(self.block.shape, self.splits).moved(self.block.offset)
        return HeldBox(box, (0,) * len(box.shape))

    def of_state(self, shape: Ints) -> ExpertLayout | None:
        """The layout of a parameter's optimizer state, by the shape that this rank has of it.

        State of the parameter's shape lies as the parameter does. So does state with an extent of 1 along axes that no
        rank cuts (Adafactor's rows and columns). Of any other shape there is none.
        """
        if tuple(shape) == self.local_shape:
            return self
        return self._without(self._reduced(tuple(shape)))

    @classmethod
    def from_dtensor(cls, dtensor: DTensor, *, expert_dim: int = 0, name: str = _NAMELESS) -> ExpertLayout:
        """Of a DTensor whose mesh has the expert-parallel dimension: its placements say all.

        Args:
            dtensor: The parameter, of the shape of all experts.
            expert_dim: The axis that counts experts.
            name: For errors.

        Raises:
            ShardingError: a placement other than shards and replicas, or a local tensor that is not as they say.
        """
        shape = tuple(dtensor.shape)
        axis = _axis(expert_dim, shape, name)
        if dtensor.device_mesh.get_coordinate() is None:
            return cls(shape, _whole(shape), expert_dim=axis, inside=False)
        made = cls(shape, _whole(shape), tuple(splits_of(name, dtensor)), replica_inside(dtensor), axis)
        return made._checked(tuple(local_of(dtensor).shape), name)

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
        """Of a DTensor that holds one rank's experts, cut by FSDP alone.

        The experts are cut first and FSDP cuts inside, also where both cut the same axis.

        Args:
            dtensor: The parameter, as long as this rank's experts, on a mesh without the expert-parallel dimension.
            mesh: The mesh that has it: with the other dimensions, or alone.
            ep: Name of that dimension.
            expert_dim: The axis that counts experts.
            experts_per_rank: How many experts every rank of that dimension has; None where all have as many, or where
                ``global_shape`` says how many there are and they are dealt out as ``torch.chunk`` does.
            global_shape: Shape with all experts; None to work it out.
            name: For errors.

        Raises:
            ShardingError: the meshes contradict each other, or the tensor is not as long as its place.
        """
        if mesh.get_coordinate() is None or dtensor.device_mesh.get_coordinate() is None:
            return cls._outside(tuple(dtensor.shape), mesh, dtensor.device_mesh, expert_dim, name)
        ep_dim = mesh_dim(mesh, ep)
        replica = (*replica_inside(dtensor), *replica_outside(dtensor.device_mesh, mesh, ep_dim, name))
        experts = _Experts(mesh, ep_dim, _axis(expert_dim, dtensor.shape, name), experts_per_rank, name)
        shape, block = experts.place(tuple(dtensor.shape), global_shape)
        made = cls(shape, block, tuple(splits_of(name, dtensor)), replica, experts.axis)
        if block.shape != tuple(dtensor.shape):
            raise _misfit(name, tuple(dtensor.shape), block.shape, made)
        return made._checked(tuple(local_of(dtensor).shape), name)

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
        """Of a plain tensor with this rank's experts, or with FSDP's part of them.

        Mesh dimensions other than these two hold copies. Where the mesh names the ranks in another order than the job
        deals experts out, and all parts are equally long, nothing but a comparison of the copies can tell.

        Args:
            tensor: The local tensor.
            mesh: The mesh.
            ep: Name of the dimension whose ranks have different experts.
            fsdp: Name of the dimension whose ranks have parts of the same experts; not looked for without ``fsdp_dim``.
            fsdp_dim: The axis that it cuts, after the experts were cut; None where it does not.
            expert_dim: The axis that counts experts.
            experts_per_rank: As in :meth:`from_efsdp`.
            global_shape: As there; needed where FSDP cuts unevenly.
            name: For errors.

        Raises:
            ShardingError: the mesh lacks a dimension, or the tensor is not as long as its place.
        """
        shape = tuple(tensor.shape)
        here = mesh.get_coordinate()
        if here is None:
            return cls(shape, _whole(shape), expert_dim=_axis(expert_dim, shape, name), inside=False)
        ep_dim, held = mesh_dim(mesh, ep), list(shape)
        used = {ep_dim}
        splits: tuple[Split, ...] = ()
        if fsdp_dim is not None:
            step = mesh_dim(mesh, fsdp)
            used.add(step)
            split = Split(_axis(fsdp_dim, shape, name), mesh.size(step), here[step])
            splits = (split,)
            held[split.dim] *= split.count
        experts = _Experts(mesh, ep_dim, _axis(expert_dim, shape, name), experts_per_rank, name)
        whole, block = experts.place(tuple(held), global_shape)
        replica = tuple(index for dim, index in enumerate(here) if dim not in used)
        made = cls(whole, block, splits, replica, experts.axis)
        return made._checked(shape, name)

    @classmethod
    def _outside(cls, shape: Ints, mesh: DeviceMesh, inner: DeviceMesh, expert_dim: int, name: str) -> ExpertLayout:
        if (mesh.get_coordinate() is None) != (inner.get_coordinate() is None):
            raise ShardingError(
                f"{name!r}: this rank is in one and not in the other of the mesh {mesh.mesh_dim_names} of ranks "
                f"{mesh.mesh.flatten().tolist()} and the tensor's own, of ranks {inner.mesh.flatten().tolist()}"
            )
        return cls(shape, _whole(shape), expert_dim=_axis(expert_dim, shape, name), inside=False)

    def _checked(self, shape: Ints, name: str) -> ExpertLayout:
        """The layout, if the rank's tensor has the shape that it says."""
        if self.inside and shape != self.local_shape:
            raise _misfit(name, shape, self.local_shape, self)
        return self

    def _reduced(self, shape: Ints) -> tuple[int, ...] | None:
        """The axes along which state of that shape has an extent of 1 and the parameter another."""
        pairs = list(zip(shape, self.local_shape, strict=False))
        if len(shape) != len(self.local_shape) or any(size not in (1, full) for size, full in pairs):
            return None
        return tuple(axis for axis, (size, full) in enumerate(pairs) if size != full)

    def _without(self, axes: tuple[int, ...] | None) -> ExpertLayout | None:
        """The layout with an extent of 1 along some axes, if nothing cuts them."""
        if axes is None or not self.inside:
            return None
        if any(self.block.shape[axis] != self.global_shape[axis] for axis in axes):
            return None
        if {split.dim for split in self.splits if split.count > 1} & {*axes} or self.expert_dim in axes:
            return None
        block = Box(self.block.offset, _ones(self.block.shape, axes))
        return replace(self, global_shape=_ones(self.global_shape, axes), block=block)


class _Experts:
    """How a mesh dimension deals out experts."""

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

    def place(self, held: Ints, global_shape: Sequence[int] | None) -> tuple[Ints, Box]:
        """The shape with all experts, and this rank's block of it.

        Args:
            held: Shape of one rank's experts, uncut.
            global_shape: As the caller knows it.
        """
        total = held[self.axis] * self._ranks if self._counts is None else sum(self._counts)
        shape = _with(held, self.axis, total) if global_shape is None else tuple(global_shape)
        if len(shape) != len(held) or (self._counts is not None and shape[self.axis] != total):
            raise ShardingError(
                f"{self._name!r}: global_shape {shape} does not fit this rank's {held}"
                + ("" if self._counts is None else f" and experts_per_rank={list(self._counts)}")
            )
        if self._counts is None:
            split = Split(self.axis, self._ranks, self._rank)
            found = list_held_boxes(shape, [split])
            return shape, found[0].box if found else make_empty_box(shape, [split])
        starts = list(accumulate(self._counts, initial=0))
        box = _whole(shape)
        offset = _with(box.offset, self.axis, starts[self._rank])
        return shape, Box(offset, _with(shape, self.axis, self._counts[self._rank]))


def _misfit(name: str, shape: Ints, place: Ints, layout: ExpertLayout) -> ShardingError:
    return ShardingError(
        f"{name!r}: this rank's tensor has shape {shape}, but its place by the mesh is {place}, in {layout.block} of "
        f"the global shape {layout.global_shape}: this is not the mesh that it was sharded on, or experts are dealt "
        "out unevenly (give experts_per_rank or global_shape)"
    )


def _axis(axis: int, shape: Sequence[int], name: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ShardingError(f"{name!r}: a tensor of shape {tuple(shape)} has no axis {axis}")
    return axis % len(shape)


def _whole(shape: Ints) -> Box:
    return Box((0,) * len(shape), shape)


def _with(shape: Ints, axis: int, size: int) -> Ints:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _ones(shape: Ints, axes: tuple[int, ...]) -> Ints:
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))


__all__ = ["ExpertLayout"]
