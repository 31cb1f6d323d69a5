"""MindSpeed-LLM's functions for expert checkpoints, which other trainers have too, on top of ``shardckpt_ep``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardckpt.adapters import get_dtensor_splits
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
    find_mesh_dim,
    gather_experts_per_rank,
    get_local_tensor,
    get_replica_coordinates,
    get_stored_tensor,
    has_mesh_dim,
    local_plan,
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
    """Collective: turn a tensor of this rank's experts into a DTensor of all experts, for a save.

    The expert-parallel dimension shards first and FSDP within, whatever the order of the mesh dimensions. With
    ``global_shape``, no other rank is needed.

    Args:
        tensor: A DTensor that FSDP has sharded, or a plain tensor of this rank's experts. A DTensor on a mesh with the
            expert-parallel dimension is returned as it is.
        mesh: The mesh that the model was sharded on, with all its dimensions.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.
        global_shape: Shape with all experts. Without it, the ranks of that dimension exchange how many they have.

    Returns:
        A DTensor of the global shape that shares the tensor's memory.

    Raises:
        ShardingError: the tensor is not sharded on this mesh; this rank is not in the mesh; or experts are not assigned
            to ranks as by ``torch.chunk``, which no DTensor describes: use an ExpertLayout.
    """
    if isinstance(tensor, DTensor) and has_mesh_dim(tensor.device_mesh, ep):
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
        get_local_tensor(tensor),
        mesh,
        _placements(tensor, mesh, ep, layout.expert_dim),
        run_check=False,
        shape=torch.Size(layout.global_shape),
        stride=torch.empty(layout.global_shape, device="meta").stride(),
    )
    # from_local without run_check checks nothing: uneven experts would be stored at wrong offsets
    if list_held_boxes(layout.global_shape, get_dtensor_splits(name, restored)) != layout.pieces():
        raise ShardingError(
            f"experts are assigned over {mesh} in a way that no DTensor describes ({layout}): use an ExpertLayout with "
            "expert_sharded_state_dict or EPSavePlanner"
        )
    return restored


def drop_ep_dim(
    tensor: torch.Tensor, mesh: DeviceMesh | None = None, *, ep: Names = EP_NAMES, expert_dim: int = 0
) -> torch.Tensor:
    """Undo :func:`restore_ep_dim` after a load.

    Args:
        tensor: A DTensor on a mesh with the expert-parallel dimension; any other tensor is returned as it is.
        mesh: The mesh that it must be on; None for its own.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.

    Returns:
        A DTensor of this rank's experts on the other mesh dimensions, or a plain tensor if none of them shards it. It
        shares the tensor's memory.

    Raises:
        ShardingError: the tensor is on another mesh, or FSDP shards the axis of experts before expert parallelism.
    """
    if not isinstance(tensor, DTensor) or not has_mesh_dim(tensor.device_mesh, ep):
        return tensor
    own = tensor.device_mesh
    if mesh is not None and not _is_same_mesh(own, mesh):
        raise ShardingError(
            f"the tensor is on the mesh {own.mesh_dim_names} of ranks {own.mesh.tolist()}, not on "
            f"{mesh.mesh_dim_names} of {mesh.mesh.tolist()}"
        )
    ep_dim = find_mesh_dim(own, ep)
    rest = [dim for dim in range(own.ndim) if dim != ep_dim]
    placements = [_without_stride(tensor.placements[dim]) for dim in rest]
    if not any(isinstance(place, Shard) for place in placements):
        return get_local_tensor(tensor)
    shape = _local_experts_shape(tensor, ep_dim, expert_dim)
    names = tuple((own.mesh_dim_names or ())[dim] for dim in rest)
    dropped = DTensor.from_local(
        get_local_tensor(tensor),
        own[names],
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    inside = compute_local_shape(shape, get_dtensor_splits("the tensor to be dropped", dropped))
    if inside != tuple(dropped.to_local().shape):
        raise ShardingError(f"{tensor.placements} of {own} do not shard the experts first: redistribute the tensor")
    return dropped


@dataclasses.dataclass(frozen=True)
class EPSpecInfo:
    """The sharding of an expert parameter.

    Attributes:
        placement: Placements of the DTensor of all experts, one for each dimension of the mesh.
        ep_fsdp_mesh: The mesh.
    """

    placement: tuple[Placement, ...]
    ep_fsdp_mesh: DeviceMesh


def build_ep_fqn2spec_info(
    model: Module, mesh: DeviceMesh, ep_plan: Collection[str], *, ep: Names = EP_NAMES, expert_dim: int = 0
) -> dict[str, EPSpecInfo]:
    """Return the sharding of every parameter of a model's expert modules. Creates no process group.

    Args:
        model: The model.
        mesh: The mesh that it was sharded on.
        ep_plan: Name patterns of modules with experts; see :func:`shardckpt_ep.expert_layouts`.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.

    Returns:
        The sharding by full parameter name, without the prefixes of wrappers.
    """
    return {
        name: EPSpecInfo(_placements(param, mesh, ep, expert_dim), mesh)
        for name, param in expert_parameters(model, ep_plan)
    }


def get_check_moe_func(
    model: Module, ep_plan: Collection[str] = (), *, ep: Names = EP_NAMES, fsdp: Names = FSDP_NAMES
) -> Callable[[str], bool]:
    """Make a function that recognizes the keys of experts.

    Args:
        model: The model. A parameter on a mesh with the expert-parallel dimension, or with FSDP's dimension over
            experts, is an expert's.
        ep_plan: Name patterns of modules with experts, needed if their parameters are plain tensors.
        ep: Names of the expert-parallel dimension.
        fsdp: Names of FSDP's dimension over experts.

    Returns:
        ``check(key)``, which returns whether a key is that of an expert parameter, or of its optimizer state.
    """
    found = [name for name, _ in expert_parameters(model, ep_plan)]
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and (
            has_mesh_dim(param.device_mesh, ep) or has_mesh_dim(param.device_mesh, fsdp)
        ):
            found.append(name)
    names = ExpertNames(found)
    return lambda key: names.find(key) is not None


def get_chunk_readitem(
    read_item: ReadItem, ep_rank: int, dim: int = 0, *, stored: TensorStorageMetadata, experts: int | None = None
) -> ReadItem:
    """Move a read item, planned as if every rank had the first experts, to where this rank's experts are stored.

    Args:
        read_item: The item; an item of an object is returned as it is.
        ep_rank: The expert-parallel rank.
        dim: The axis that counts experts.
        stored: Metadata of the stored tensor.
        experts: Number of experts on every rank; None if the item reads all of a rank's experts.

    Returns:
        The moved item.

    Raises:
        ShardingError: the item has no such axis, or its experts are in several stored chunks.
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
    requested = Box((*start[:dim], start[dim] + step, *start[dim + 1 :]), tuple(read_item.lengths))
    for number, chunk in enumerate(stored.chunks):
        inside = tuple(off - base for off, base in zip(requested.offset, chunk.offsets, strict=True))
        ends = (off + size for off, size in zip(inside, requested.shape, strict=True))
        if min(inside) >= 0 and all(end <= size for end, size in zip(ends, chunk.sizes, strict=True)):
            index = dataclasses.replace(read_item.storage_index, offset=chunk.offsets, index=number)
            return dataclasses.replace(read_item, storage_index=index, storage_offsets=torch.Size(inside))
    raise ShardingError(
        f"{read_item.dest_index.fqn!r}: {requested} lies in several stored chunks, or outside the stored tensor of "
        f"shape {tuple(stored.size)}: use EPLoadPlanner, which handles both"
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
    """Plan DCP's load of a flat state dict in which some tensors hold this rank's experts of the stored tensors.

    Experts are assigned to ranks as by ``torch.chunk`` along axis 0.

    Args:
        state_dict: Tensors by flattened key.
        metadata: The checkpoint's metadata.
        strict: Whether all keys must be stored.
        ep_rank: The expert-parallel rank.
        ep_size: The expert-parallel size.
        check_moe_fn: Returns whether a key is an expert's; see :func:`get_check_moe_func`.

    Returns:
        This rank's plan, for any DCP planner.

    Raises:
        ShapeMismatchError: a tensor has neither the shape of this rank's part of the stored tensor nor of all of it.
    """

    def layout_of(key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:
        return _layout_by_rank(key, value, metadata, Split(0, ep_size, ep_rank)) if check_moe_fn(key) else None

    return local_plan(state_dict, metadata, layout_of, strict=strict)[0]


class EPLoadPlanner(LocalExpertsLoadPlanner):
    """Loads this rank's experts by its rank and size; :class:`shardckpt_ep.EPLoadPlanner` takes layouts instead.

    Experts are assigned to ranks as by ``torch.chunk`` along axis 0; a DTensor's mesh shards them further.

    Args:
        ep_rank: The expert-parallel rank.
        ep_size: The expert-parallel size.
        check_moe_fn: Returns whether a key is an expert's; see :func:`get_check_moe_func`.
        **kwargs: Arguments of DCP's DefaultLoadPlanner, and ``allow_globals`` and ``allow_dtype_cast``.
    """

    def __init__(self, ep_rank: int, ep_size: int, check_moe_fn: Callable[[str], bool], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if not 0 <= ep_rank < ep_size:
            raise ShardingError(f"there is no ep_rank {ep_rank} of {ep_size}")
        self._split = Split(0, ep_size, ep_rank)
        self._check = check_moe_fn

    def layout_of(self, key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:
        """Return the layout of this rank's part of a stored tensor; None for a key that is not an expert's."""
        return _layout_by_rank(key, value, metadata, self._split) if self._check(key) else None


def _layout_by_rank(key: str, value: Any, metadata: Metadata, split: Split) -> ExpertLayout | None:
    """Return the layout of a rank's part of a stored tensor; None if the value has no axis of experts, or all."""
    if not isinstance(value, torch.Tensor) or key not in metadata.state_dict_metadata:
        return None
    shape = tuple(get_stored_tensor(key, metadata).size)
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
    return ExpertLayout(shape, box, tuple(get_dtensor_splits(key, value)), get_replica_coordinates(value))


def _layout(
    tensor: torch.Tensor, mesh: DeviceMesh, ep: Names, expert_dim: int, *, name: str, **counts: Any
) -> ExpertLayout:
    if isinstance(tensor, DTensor):
        return ExpertLayout.from_efsdp(tensor, mesh, ep=ep, expert_dim=expert_dim, name=name, **counts)
    return ExpertLayout.from_local(tensor, mesh, ep=ep, expert_dim=expert_dim, name=name, **counts)


def _placements(tensor: torch.Tensor, mesh: DeviceMesh, ep: Names, expert_dim: int) -> tuple[Placement, ...]:
    """Return the placements of the DTensor of all experts, for a tensor of one rank's experts."""
    if isinstance(tensor, DTensor) and has_mesh_dim(tensor.device_mesh, ep):
        return tuple(tensor.placements)
    ep_dim = find_mesh_dim(mesh, ep)
    inner = _inner_placements(tensor, mesh)
    factor = mesh.size(ep_dim)
    found: list[Placement] = []
    for dim in range(mesh.ndim):
        place = inner.get(dim, Replicate())
        if dim == ep_dim:
            place = Shard(expert_dim)
        elif dim < ep_dim and factor > 1 and isinstance(place, Shard) and place.dim == expert_dim:
            # expert parallelism shards the axis first, though its mesh dimension comes later
            place = StridedShard(expert_dim, split_factor=factor)
        found.append(place)
    return tuple(found)


def _inner_placements(tensor: torch.Tensor, mesh: DeviceMesh) -> dict[int, Placement]:
    """Map a DTensor's placements to the dimensions of the full mesh, which are recognized by their ranks."""
    if not isinstance(tensor, DTensor):
        return {}
    own, taken = tensor.device_mesh, {}
    for dim, place in enumerate(tensor.placements):
        same = [
            other
            for other in range(mesh.ndim)
            if other not in taken and _ranks_along(mesh, other) == _ranks_along(own, dim)
        ]
        if not same:
            raise ShardingError(
                f"the tensor is sharded over ranks {_ranks_along(own, dim)}, which no dimension of the mesh "
                f"{mesh.mesh_dim_names} {mesh.mesh.tolist()} has: pass the mesh that the model was sharded on"
            )
        taken[same[0]] = place
    return taken


def _ranks_along(mesh: DeviceMesh, dim: int) -> list[int]:
    """Return the ranks along a mesh dimension through this rank."""
    here = mesh.get_coordinate() or (0,) * mesh.ndim
    place = tuple(slice(None) if other == dim else index for other, index in enumerate(here))
    return mesh.mesh[place].tolist()


def _local_experts_shape(tensor: DTensor, ep_dim: int, expert_dim: int) -> Ints:
    """Return the shape of this rank's experts before FSDP shards them."""
    count, here = tensor.device_mesh.size(ep_dim), tensor.device_mesh.get_coordinate() or (0,) * tensor.device_mesh.ndim
    return compute_local_shape(tensor.shape, [Split(expert_dim, count, here[ep_dim])])


def _is_same_mesh(mesh: DeviceMesh, other: DeviceMesh) -> bool:
    return mesh.mesh_dim_names == other.mesh_dim_names and mesh.mesh.equal(other.mesh)


def _without_stride(place: Placement) -> Placement:
    """Return a placement without the stride that the sharding of experts adds."""
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
