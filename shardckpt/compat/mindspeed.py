"""The names of MindSpeed-LLM's and other trainers' expert checkpoints, with what they are for done right."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardckpt.adapters import splits_of
from shardckpt.errors import ShapeMismatchError, ShardingError
from shardckpt.planning import Box, Split, compute_local_shape, list_held_boxes, make_empty_box
from shardckpt_ep import (
    EP_NAMES,
    FSDP_NAMES,
    ExpertLayout,
    ExpertNames,
    LocalExpertsLoadPlanner,
    StridedShard,
    expert_parameters,
    gather_experts_per_rank,
    has_dim,
    local_of,
    local_plan,
    mesh_dim,
    replica_inside,
    stored_tensor,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from shardckpt.planning import Ints
    from shardckpt_ep import Names


def restore_ep_dim(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    *,
    ep: Names = EP_NAMES,
    expert_dim: int = 0,
    global_shape: Sequence[int] | None = None,
) -> DTensor:
    """A tensor of this rank's experts as a DTensor of all experts, for a save: the same memory.

    The expert-parallel dimension cuts first and FSDP inside, whatever the order of the mesh dimensions. A DTensor that
    has the expert-parallel dimension comes back as it is.

    Args:
        tensor: A DTensor cut by FSDP alone, or a plain tensor of this rank's experts.
        mesh: The mesh that the model was sharded on, with all its dimensions.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.
        global_shape: Shape with all experts; without it the ranks of that dimension tell each other how many they
            have, in a collective.

    Raises:
        ShardingError: the mesh is another one, this rank is not in it, or experts are dealt out otherwise than
            ``torch.chunk`` does, which no DTensor describes: use an ExpertLayout.
    """
    if isinstance(tensor, DTensor) and has_dim(tensor.device_mesh, ep):
        return tensor
    name = "the tensor to be restored"
    if mesh.get_coordinate() is None:
        raise ShardingError(
            f"this rank is not in the mesh {mesh.mesh_dim_names} and holds no experts: leave {name} out"
        )
    if global_shape is None:
        counts = gather_experts_per_rank(tensor.shape[expert_dim], mesh, ep)
        layout = _layout(tensor, mesh, ep, expert_dim, experts_per_rank=counts, name=name)
    else:
        layout = _layout(tensor, mesh, ep, expert_dim, global_shape=global_shape, name=name)
    restored = DTensor.from_local(
        local_of(tensor),
        mesh,
        _placements(tensor, mesh, ep, layout.expert_dim),
        run_check=False,
        shape=torch.Size(layout.global_shape),
        stride=torch.empty(layout.global_shape, device="meta").stride(),
    )
    if list_held_boxes(layout.global_shape, splits_of(name, restored)) != layout.pieces():
        raise ShardingError(
            f"experts are dealt out over {mesh} as no DTensor describes it ({layout}): use an ExpertLayout with "
            "expert_sharded_state_dict or EPSavePlanner"
        )
    return restored


def drop_ep_dim(
    tensor: torch.Tensor, mesh: DeviceMesh | None = None, *, ep: Names = EP_NAMES, expert_dim: int = 0
) -> torch.Tensor:
    """What :func:`restore_ep_dim` made a DTensor of all experts of, after a load: the same memory.

    Args:
        tensor: A DTensor with the expert-parallel mesh dimension; anything else comes back as it is.
        mesh: The mesh that it must be on; None for its own.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.

    Returns:
        A DTensor of this rank's experts on the other mesh dimensions, or a plain tensor where none of them cuts it.

    Raises:
        ShardingError: it is on another mesh, or FSDP's cut of the same axis cannot be told from the experts'.
    """
    if not isinstance(tensor, DTensor) or not has_dim(tensor.device_mesh, ep):
        return tensor
    own = tensor.device_mesh
    if mesh is not None and not _same(own, mesh):
        raise ShardingError(
            f"the tensor is on the mesh {own.mesh_dim_names} of ranks {own.mesh.tolist()}, not on "
            f"{mesh.mesh_dim_names} of {mesh.mesh.tolist()}"
        )
    ep_dim = mesh_dim(own, ep)
    rest = [dim for dim in range(own.ndim) if dim != ep_dim]
    placements = [_plain(tensor.placements[dim]) for dim in rest]
    if not any(isinstance(place, Shard) for place in placements):
        return local_of(tensor)
    shape = _experts_here(tensor, ep_dim, expert_dim)
    names = tuple((own.mesh_dim_names or ())[dim] for dim in rest)
    dropped = DTensor.from_local(
        local_of(tensor),
        own[names],
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    inside = compute_local_shape(shape, splits_of("the tensor to be dropped", dropped))
    if inside != tuple(dropped.to_local().shape):
        raise ShardingError(f"{tensor.placements} of {own} do not cut the experts first: redistribute the tensor")
    return dropped


@dataclasses.dataclass(frozen=True)
class EPSpecInfo:
    """How an expert parameter lies.

    Attributes:
        placement: Of the DTensor of all experts, one a dimension of the mesh.
        ep_fsdp_mesh: The mesh.
    """

    placement: tuple[Placement, ...]
    ep_fsdp_mesh: DeviceMesh


def build_ep_fqn2spec_info(
    model: Module, mesh: DeviceMesh, ep_plan: Collection[str], *, ep: Names = EP_NAMES, expert_dim: int = 0
) -> dict[str, EPSpecInfo]:
    """How every parameter of a model's expert modules lies, by its name without wrappers; no process group is made.

    Args:
        model: The model, with its expert modules anywhere.
        mesh: The mesh that it was sharded on.
        ep_plan: Places of modules with experts; see :func:`shardckpt_ep.expert_layouts`.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.
    """
    return {
        name: EPSpecInfo(_placements(param, mesh, ep, expert_dim), mesh)
        for name, param in expert_parameters(model, ep_plan)
    }


def get_check_moe_func(
    model: Module, ep_plan: Collection[str] = (), *, ep: Names = EP_NAMES, fsdp: Names = FSDP_NAMES
) -> Callable[[str], bool]:
    """A function that says of a key whether it is an expert parameter's, or its state's in an optimizer.

    Args:
        model: The model; parameters on a mesh with the expert-parallel dimension or FSDP's of experts are experts'.
        ep_plan: Places of modules with experts, for those whose parameters are plain tensors.
        ep: Names of the expert-parallel dimension.
        fsdp: Names of FSDP's dimension over experts.
    """
    found = [name for name, _ in expert_parameters(model, ep_plan)]
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and (has_dim(param.device_mesh, ep) or has_dim(param.device_mesh, fsdp)):
            found.append(name)
    names = ExpertNames(found)
    return lambda key: names.find(key) is not None


def get_chunk_readitem(
    read_item: ReadItem, ep_rank: int, dim: int = 0, *, stored: TensorStorageMetadata, experts: int | None = None
) -> ReadItem:
    """An item that was planned as though a rank's experts were the first ones, moved to where they are stored.

    Args:
        read_item: The item; items of objects come back as they are.
        ep_rank: The rank among those with different experts.
        dim: The axis that counts experts.
        stored: What the checkpoint has of the tensor.
        experts: How many experts every rank has; None where the item reads all of them.

    Raises:
        ShardingError: the item has no such axis, or what it is to read lies in several stored chunks.
    """
    if read_item.type is LoadItemType.BYTE_IO:
        return read_item
    if not 0 <= dim < len(read_item.lengths) or ep_rank < 0:
        raise ShardingError(f"{read_item.dest_index.fqn!r}: {read_item} cannot be moved along axis {dim} to {ep_rank}")
    start = tuple(
        base + offset
        for base, offset in zip(read_item.storage_index.offset or (), read_item.storage_offsets, strict=True)
    )
    step = ep_rank * (read_item.lengths[dim] if experts is None else experts)
    wanted = Box((*start[:dim], start[dim] + step, *start[dim + 1 :]), tuple(read_item.lengths))
    for number, chunk in enumerate(stored.chunks):
        inside = tuple(off - base for off, base in zip(wanted.offset, chunk.offsets, strict=True))
        ends = (off + size for off, size in zip(inside, wanted.shape, strict=True))
        if min(inside) >= 0 and all(end <= size for end, size in zip(ends, chunk.sizes, strict=True)):
            index = dataclasses.replace(read_item.storage_index, offset=chunk.offsets, index=number)
            return dataclasses.replace(read_item, storage_index=index, storage_offsets=torch.Size(inside))
    raise ShardingError(
        f"{read_item.dest_index.fqn!r}: {wanted} lies in several stored chunks, or outside the stored tensor of shape "
        f"{tuple(stored.size)}: EPLoadPlanner plans for both"
    )


def create_default_local_load_plan_with_moe(
    state_dict: Mapping[str, Any],
    metadata: Metadata,
    strict: bool = True,
    *,
    ep_rank: int,
    ep_size: int,
    check_moe_fn: Callable[[str], bool],
) -> LoadPlan:
    """DCP's plan for a flat state dict of which some tensors hold one rank's experts of what is stored.

    Any DCP planner can carry it out. Experts are dealt out as ``torch.chunk`` does, along axis 0.

    Args:
        state_dict: Tensors by key, with dots.
        metadata: The checkpoint's.
        strict: Whether all keys must be stored.
        ep_rank: The rank among those with different experts.
        ep_size: How many these are.
        check_moe_fn: Says of a key whether it is an expert's; see :func:`get_check_moe_func`.

    Raises:
        ShapeMismatchError: a tensor is neither as long as the rank's part of the stored one nor as all of it.
    """

    def layout_of(key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:
        return _dealt(key, value, metadata, Split(0, ep_size, ep_rank)) if check_moe_fn(key) else None

    return local_plan(state_dict, metadata, layout_of, strict=strict)[0]


class EPLoadPlanner(LocalExpertsLoadPlanner):
    """Loads this rank's experts by its number alone; :class:`shardckpt_ep.EPLoadPlanner` takes layouts.

    Experts are dealt out as ``torch.chunk`` does, along axis 0; a DTensor's mesh cuts inside.

    Args:
        ep_rank: The rank among those with different experts.
        ep_size: How many these are.
        check_moe_fn: Says of a key whether it is an expert's; see :func:`get_check_moe_func`.
        **kwargs: Of DCP's DefaultLoadPlanner, and ``allow_globals`` and ``allow_dtype_cast``.
    """

    def __init__(self, ep_rank: int, ep_size: int, check_moe_fn: Callable[[str], bool], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= ep_rank < ep_size:
            raise ShardingError(f"there is no ep_rank {ep_rank} of {ep_size}")
        self._split = Split(0, ep_size, ep_rank)
        self._check = check_moe_fn

    def layout_of(self, key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:
        """This rank's part of what is stored."""
        return _dealt(key, value, metadata, self._split) if self._check(key) else None


def _dealt(key: str, value: Any, metadata: Metadata, split: Split) -> ExpertLayout | None:
    """The layout of a rank's part of what is stored; None where the value has no axis of experts, or has all."""
    if not isinstance(value, torch.Tensor) or key not in metadata.state_dict_metadata:
        return None
    shape = tuple(stored_tensor(key, metadata).size)
    if not shape or (tuple(value.shape) == shape and split.count > 1):
        return None
    found = list_held_boxes(shape, [split])
    box = found[0].box if found else make_empty_box(shape, [split])
    if tuple(value.shape) != box.shape:
        raise ShapeMismatchError(
            f"{key!r} is stored with shape {shape}, of which rank {split.index} of {split.count} has {box.shape}; the "
            f"tensor to be filled has {tuple(value.shape)}"
        )
    if not isinstance(value, DTensor):
        return ExpertLayout(shape, box)
    if value.device_mesh.get_coordinate() is None:
        return ExpertLayout(shape, box, inside=False)
    return ExpertLayout(shape, box, tuple(splits_of(key, value)), replica_inside(value))


def _layout(
    tensor: torch.Tensor, mesh: DeviceMesh, ep: Names, expert_dim: int, *, name: str, **counts: Any
) -> ExpertLayout:
    if isinstance(tensor, DTensor):
        return ExpertLayout.from_efsdp(tensor, mesh, ep=ep, expert_dim=expert_dim, name=name, **counts)
    return ExpertLayout.from_local(tensor, mesh, ep=ep, expert_dim=expert_dim, name=name, **counts)


def _placements(tensor: torch.Tensor, mesh: DeviceMesh, ep: Names, expert_dim: int) -> tuple[Placement, ...]:
    """The placements of the DTensor of all experts, for a tensor of one rank's, on a mesh with all dimensions."""
    if isinstance(tensor, DTensor) and has_dim(tensor.device_mesh, ep):
        return tuple(tensor.placements)
    ep_dim = mesh_dim(mesh, ep)
    inner = _inner_placements(tensor, mesh)
    factor = mesh.size(ep_dim)
    found: list[Placement] = []
    for dim in range(mesh.ndim):
        place = inner.get(dim, Replicate())
        if dim == ep_dim:
            place = Shard(expert_dim)
        elif dim < ep_dim and factor > 1 and isinstance(place, Shard) and place.dim == expert_dim:
            place = StridedShard(
                expert_dim, split_factor=factor
            )  # experts are cut first, though their dimension comes later
        found.append(place)
    return tuple(found)


def _inner_placements(tensor: torch.Tensor, mesh: DeviceMesh) -> dict[int, Placement]:
    """The placements of a DTensor, by the dimension of the whole mesh whose ranks are those of its own."""
    if not isinstance(tensor, DTensor):
        return {}
    own, taken = tensor.device_mesh, {}
    for dim, place in enumerate(tensor.placements):
        same = [other for other in range(mesh.ndim) if other not in taken and _line(mesh, other) == _line(own, dim)]
        if not same:
            raise ShardingError(
                f"the tensor is cut over ranks {_line(own, dim)}, which no dimension of the mesh {mesh.mesh_dim_names} "
                f"{mesh.mesh.tolist()} has: give the mesh that the model was sharded on"
            )
        taken[same[0]] = place
    return taken


def _line(mesh: DeviceMesh, dim: int) -> list[int]:
    """The ranks along a mesh dimension, from here."""
    here = mesh.get_coordinate() or (0,) * mesh.ndim
    place = tuple(slice(None) if other == dim else index for other, index in enumerate(here))
    return mesh.mesh[place].tolist()


def _experts_here(tensor: DTensor, ep_dim: int, expert_dim: int) -> Ints:
    """Shape of this rank's experts, before FSDP cuts them."""
    count, here = tensor.device_mesh.size(ep_dim), tensor.device_mesh.get_coordinate() or (0,) * tensor.device_mesh.ndim
    return compute_local_shape(tensor.shape, [Split(expert_dim, count, here[ep_dim])])


def _same(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return mesh.mesh_dim_names == other.mesh_dim_names and mesh.mesh.equal(other.mesh)


def _plain(place: Placement) -> Placement:
    """A placement as it is once the experts are cut."""
    return Shard(place.dim) if isinstance(place, StridedShard) else place


__all__ = [
    "EPLoadPlanner",
    "EPSpecInfo",
    "build_ep_fqn2spec_info",
    "create_default_local_load_plan_with_moe",
    "drop_ep_dim",
    "get_check_moe_func",
    "get_chunk_readitem",
    "restore_ep_dim",
]
