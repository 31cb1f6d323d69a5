"""MindSpeed-LLM's functions for FSDP2 checkpoints, and its EPLoadPlanner, under their names and signatures."""

from __future__ import annotations

import dataclasses
import gc
import inspect
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardckpt.adapters.dtensor import get_dtensor_splits, get_local_tensor, get_replica_coordinates, make_dtensor
from shardckpt.compat.torch_private import get_root_mesh
from shardckpt.errors import ShapeMismatchError, ShardingError
from shardckpt.huggingface.convert import dcp_to_torch_state_dict as _to_state_dict
from shardckpt.huggingface.dtypes import get_dtype_size
from shardckpt.huggingface.shards import get_shard_info, save_state_dict
from shardckpt.manager.cleanup import cleanup_old_checkpoints
from shardckpt.planning.boxes import Box
from shardckpt.planning.placements import Split, compute_local_shape, list_held_boxes, make_empty_box
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
    get_stored_tensor,
    has_mesh_dim,
    local_plan,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
    from torch.nn import Module

    from shardckpt.mapping.base import StateDict
    from shardckpt_ep import Names


def synchronize() -> None:
    """Wait for all work on the current accelerator; without one, there is none to wait for."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def empty_cache() -> None:
    """Free objects that nothing refers to, and give the accelerator's unused cached memory back to it."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module(torch.accelerator.current_accelerator()).empty_cache()


def dcp_to_torch_state_dict(save_checkpoint_path: str | os.PathLike[str]) -> StateDict:
    """Load all of a checkpoint as a plain state dict of this process, nested as torch's own converter has it.

    Needs no other rank.

    Args:
        save_checkpoint_path: A checkpoint of torch.distributed.checkpoint, or one of any strategy: a directory or URL.

    Returns:
        The state dict, with full tensors on the CPU: for a checkpoint of ``dcp.save``, the nested dicts and lists that
        were saved. Any other checkpoint has no paths: tensors and objects by key, and the common state.

    Raises:
        CannotLoadError: no installed strategy reads the checkpoint.
        CheckpointingException: any other failure.
    """
    return _to_state_dict(save_checkpoint_path)


def restore_ep_dim(
    origin_tensor: torch.Tensor,
    device_mesh: DeviceMesh,
    *,
    ep: Names = EP_NAMES,
    expert_dim: int = 0,
    global_shape: Sequence[int] | None = None,
) -> DTensor:
    """Collective: turn a tensor of this rank's experts into a DTensor of all experts, for a save.

    The expert-parallel dimension shards first and FSDP within, whatever the order of the mesh dimensions. With
    ``global_shape``, no other rank is needed.

    Args:
        origin_tensor: A DTensor that FSDP has sharded, or a plain tensor of this rank's experts. A DTensor on a mesh
            with the expert-parallel dimension is returned as it is.
        device_mesh: The mesh that the model was sharded on, with all its dimensions.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.
        global_shape: Shape with all experts. Without it, the ranks of that dimension exchange how many they have.

    Returns:
        A DTensor of the global shape that shares the tensor's memory.

    Raises:
        ShardingError: it is no tensor, has no such axis, or is not sharded on this mesh; this rank is not in the mesh;
            or experts are not assigned to ranks as by ``torch.chunk``, which no DTensor describes: use an ExpertLayout.
    """
    tensor, mesh = origin_tensor, device_mesh
    if not isinstance(tensor, torch.Tensor):
        raise ShardingError(
            f"origin_tensor={tensor!r:.80} is a {type(tensor).__name__}, not a tensor: leave it as it is"
        )
    if isinstance(tensor, DTensor) and has_mesh_dim(tensor.device_mesh, ep):
        return tensor
    name = "the tensor to be restored"
    if mesh.get_coordinate() is None:
        raise ShardingError(
            f"this rank is not in the mesh {mesh.mesh_dim_names} and holds no experts: leave {name} out"
        )
    expert_dim = _find_expert_dim(tensor, expert_dim)
    counts = gather_experts_per_rank(tensor.shape[expert_dim], mesh, ep) if global_shape is None else None
    describe: Any = ExpertLayout.from_efsdp if isinstance(tensor, DTensor) else ExpertLayout.from_local
    layout: ExpertLayout = describe(
        tensor, mesh, ep=ep, expert_dim=expert_dim, experts_per_rank=counts, global_shape=global_shape, name=name
    )
    placements = _placements(tensor, mesh, ep, layout.expert_dim)
    restored = make_dtensor(get_local_tensor(tensor), mesh, placements, layout.global_shape)
    # make_dtensor checks nothing: uneven experts would be stored at wrong offsets
    if list_held_boxes(layout.global_shape, get_dtensor_splits(name, restored)) != layout.pieces():
        raise ShardingError(
            f"experts are assigned over {mesh} in a way that no DTensor describes ({layout}): use an ExpertLayout with "
            "expert_sharded_state_dict or EPSavePlanner"
        )
    return restored


def drop_ep_dim(
    loaded_tensor: torch.Tensor, device_mesh: DeviceMesh | None = None, *, ep: Names = EP_NAMES, expert_dim: int = 0
) -> torch.Tensor:
    """Undo :func:`restore_ep_dim` after a load.

    Args:
        loaded_tensor: A DTensor on a mesh with the expert-parallel dimension; anything else is returned as it is.
        device_mesh: The mesh that it must be on, or on some dimensions of (``mesh["ep"]``); None for its own.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.

    Returns:
        A DTensor of this rank's experts on the other mesh dimensions, or a plain tensor if none of them shards it. It
        shares the tensor's memory.

    Raises:
        ShardingError: the tensor is on another mesh or has no such axis, or FSDP shards the axis of experts before
            expert parallelism.
    """
    tensor, mesh = loaded_tensor, device_mesh
    if not isinstance(tensor, DTensor) or not has_mesh_dim(tensor.device_mesh, ep):
        return tensor
    own = tensor.device_mesh
    if mesh is not None and not _is_part(own, mesh):
        raise ShardingError(
            f"the tensor is on the mesh {own.mesh_dim_names} of ranks {own.mesh.tolist()}, not on "
            f"{mesh.mesh_dim_names} of {mesh.mesh.tolist()}"
        )
    ep_dim = find_mesh_dim(own, ep)
    rest = [dim for dim in range(own.ndim) if dim != ep_dim]
    kept = [tensor.placements[dim] for dim in rest]
    # the stride only says that expert parallelism shards the axis first, which is undone here
    placements = [Shard(place.dim) if isinstance(place, StridedShard) else place for place in kept]
    if not any(isinstance(place, Shard) for place in placements):
        return get_local_tensor(tensor)
    expert_dim = _find_expert_dim(tensor, expert_dim)
    here = own.get_coordinate() or (0,) * own.ndim
    shape = compute_local_shape(tensor.shape, [Split(expert_dim, own.size(ep_dim), here[ep_dim])])
    names = tuple((own.mesh_dim_names or ())[dim] for dim in rest)
    dropped = make_dtensor(get_local_tensor(tensor), own[names], placements, shape)
    # a DTensor whose local tensor contradicts its placements would be stored at wrong offsets
    inside = compute_local_shape(shape, get_dtensor_splits("the tensor to be dropped", dropped))
    if inside != tuple(dropped.to_local().shape):
        raise ShardingError(f"{tensor.placements} of {own} do not shard the experts first: redistribute the tensor")
    return dropped


@dataclasses.dataclass(frozen=True)
class EPSpecInfo:
    """The sharding of an expert parameter.

    Attributes:
        placement: The placement on the expert-parallel dimension, as in VeOmni: ``Shard(0)``.
        ep_fsdp_mesh: The mesh with that dimension, and FSDP's.
        placements: Placements of the DTensor of all experts, one for each dimension of the mesh; None if not known.
    """

    placement: Placement
    ep_fsdp_mesh: DeviceMesh
    placements: tuple[Placement, ...] | None = None


def build_ep_fqn2spec_info(
    model: Module, parallel_state: Any, ep_plan: Any, *, ep: Names = EP_NAMES, expert_dim: int = 0
) -> dict[str, EPSpecInfo]:
    """Return the sharding of every parameter of a model's expert modules. Creates no process group.

    Args:
        model: The model.
        parallel_state: The mesh that it was sharded on, or the trainer's object that has this mesh as an attribute or
            property, or returns it from a ``get_..._mesh()`` method; or a dict with it. The mesh with the
            expert-parallel dimension counts, and of several the largest. If the object has none, it is the mesh that
            the experts' parameters were sharded on.
        ep_plan: Name patterns of modules with experts (``"layers.{*}.mlp.experts"``, ``{0-5}``), as for
            :func:`shardckpt_ep.expert_layouts`; or the trainer's plan, which has them as ``apply_modules``.
        ep: Name of the expert-parallel dimension.
        expert_dim: The axis that counts experts.

    Returns:
        The sharding by full parameter name, without the prefixes of wrappers.

    Raises:
        ShardingError: neither the parallel state nor a parameter has such a mesh, or there are several; the plan has no
            patterns, or none that matches; a parameter has no such axis.
    """
    experts = list(expert_parameters(model, _get_patterns(ep_plan), each=False))
    mesh = _find_mesh(parallel_state, ep, [param for _, param in experts])
    found = {}
    for name, param in experts:
        dim = _find_expert_dim(param, expert_dim)
        found[name] = EPSpecInfo(Shard(dim), mesh, _placements(param, mesh, ep, dim))
    return found


def get_check_moe_func(
    model: Module, ep_plan: Any = (), *, ep: Names = EP_NAMES, fsdp: Names = FSDP_NAMES
) -> Callable[[str], bool]:
    """Make a function that recognizes the keys of experts.

    Args:
        model: The model. A parameter on a mesh with the expert-parallel dimension, or with FSDP's dimension over
            experts, is an expert's.
        ep_plan: As for :func:`build_ep_fqn2spec_info`; needed if the experts' parameters are plain tensors.
        ep: Names of the expert-parallel dimension.
        fsdp: Names of FSDP's dimension over experts.

    Returns:
        ``check(key)``, which returns whether a key belongs to an expert's parameter, or to its optimizer state. Any
        modules may stand before the parameter's name: ``app.model.layers.0.experts.w1``.

    Raises:
        ShardingError: the plan has no patterns, or none that matches.
    """
    found = [name for name, _ in expert_parameters(model, _get_patterns(ep_plan), each=False)]
    sharded = ((name, param.device_mesh) for name, param in model.named_parameters() if isinstance(param, DTensor))
    found += [name for name, mesh in sharded if has_mesh_dim(mesh, ep) or has_mesh_dim(mesh, fsdp)]
    names = ExpertNames(found)

    def check(key: str) -> bool:
        parts = key.split(".")
        return any(names.find(".".join(parts[first:])) is not None for first in range(len(parts)))

    return check


def get_chunk_readitem(
    readitem: ReadItem,
    ep_rank: int,
    operate_dim: int = 0,
    *,
    stored: TensorStorageMetadata | None = None,
    experts: int | None = None,
) -> ReadItem:
    """Move a read item, planned as if every rank had the first experts, to where this rank's experts are stored.

    Args:
        readitem: The item; an item of an object is returned as it is.
        ep_rank: The expert-parallel rank.
        operate_dim: The axis that counts experts.
        stored: Metadata of the stored tensor. Without it, the item moves within its stored chunk: right where one chunk
            has all experts. An item that leaves its chunk is an error of the reader.
        experts: Number of experts on every rank; None if the item reads all of a rank's experts.

    Returns:
        The moved item.

    Raises:
        ValueError: the item's offsets and lengths are not of as many axes.
        ShardingError: the item has no such axis, reads a part of a rank's experts whose number ``experts`` does
            not say, or its experts are in several stored chunks.
    """
    read_item, dim = readitem, operate_dim
    if read_item.type is LoadItemType.BYTE_IO:
        return read_item
    axes = {name: len(getattr(read_item, name)) for name in ("storage_offsets", "dest_offsets", "lengths")}
    if len(set(axes.values())) != 1:
        found = ", ".join(f"{count} {name}" for name, count in axes.items())
        raise ValueError(f"{read_item.dest_index.fqn!r}: the item has {found}; it needs one of each for every axis")
    if not 0 <= dim < len(read_item.lengths) or ep_rank < 0:
        raise ShardingError(f"{read_item.dest_index.fqn!r}: {read_item} cannot be moved along axis {dim} to {ep_rank}")
    if experts is None and any((read_item.dest_index.offset or ())[dim : dim + 1]):
        raise ShardingError(
            f"{read_item.dest_index.fqn!r}: {read_item} reads a part of a rank's experts, which FSDP shards: "
            "pass their number as experts="
        )
    step = ep_rank * (read_item.lengths[dim] if experts is None else experts)
    if stored is None:
        moved = list(read_item.storage_offsets)
        moved[dim] += step
        return dataclasses.replace(read_item, storage_offsets=torch.Size(moved))
    start = tuple(
        base + offset
        for base, offset in zip(read_item.storage_index.offset or (), read_item.storage_offsets, strict=True)
    )
    requested = Box((*start[:dim], start[dim] + step, *start[dim + 1 :]), tuple(read_item.lengths))
    # a read item has one chunk: experts that lie in several need several items, which only a planner can make
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
    check_moe_fn: Callable[[str], bool] | None,
    ep_rank: int,
    state_dict: Mapping[str, Any],
    metadata: Metadata,
    strict: bool = True,
    *,
    ep_size: int | None = None,
) -> LoadPlan:
    """Plan DCP's load of a flat state dict in which some tensors hold this rank's experts of the stored tensors.

    Experts are assigned to ranks as by ``torch.chunk`` along axis 0.

    Args:
        check_moe_fn: Returns whether a key is an expert's, see :func:`get_check_moe_func`; None if none is.
        ep_rank: The expert-parallel rank.
        state_dict: Tensors by flattened key.
        metadata: The checkpoint's metadata.
        strict: Whether all keys must be stored.
        ep_size: The expert-parallel size. None if every rank has the same number of experts of each tensor.

    Returns:
        This rank's plan, for any DCP planner.

    Raises:
        ShapeMismatchError: a tensor has neither the shape of this rank's part of the stored tensor nor of all of it.
        ShardingError: there is no such rank; or the size is None, and stored experts cannot be divided into parts of
            this rank's number.
    """
    if ep_rank < 0 or (ep_size is not None and ep_rank >= ep_size):
        raise ShardingError(f"there is no ep_rank {ep_rank} of {ep_size}")

    def layout_of(key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:
        if check_moe_fn is None or not check_moe_fn(key):
            return None
        size = _infer_ep_size(key, value, metadata, ep_rank) if ep_size is None else ep_size
        return _layout_by_rank(key, value, metadata, Split(0, size, ep_rank))

    return local_plan(state_dict, metadata, layout_of, strict=strict)[0]


class EPLoadPlanner(LocalExpertsLoadPlanner):
    """Loads this rank's experts by its rank and size; :class:`shardckpt_ep.EPLoadPlanner` takes layouts instead.

    Experts are assigned to ranks as by ``torch.chunk`` along axis 0; a DTensor's mesh shards them further.

    Args:
        ep_rank: The expert-parallel rank.
        ep_size: The expert-parallel size.
        check_moe_fn: Returns whether a key is an expert's, see :func:`get_check_moe_func`; None if none is.
        **kwargs: Arguments of DCP's DefaultLoadPlanner, and ``allow_globals`` and ``allow_dtype_cast``.

    Attributes:
        ep_rank, ep_size, check_moe_fn: As given. A subclass may change them until the plan is made.

    Raises:
        ShardingError: there is no such rank.
    """

    def __init__(
        self, ep_rank: int = 0, ep_size: int = 1, check_moe_fn: Callable[[str], bool] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= ep_rank < ep_size:
            raise ShardingError(f"there is no ep_rank {ep_rank} of {ep_size}")
        self.ep_rank, self.ep_size, self.check_moe_fn = ep_rank, ep_size, check_moe_fn

    def layout_of(self, key: str, value: Any, metadata: Metadata) -> ExpertLayout | None:
        """Return the layout of this rank's part of a stored tensor; None for a key that is not an expert's."""
        if self.check_moe_fn is None or not self.check_moe_fn(key):
            return None
        return _layout_by_rank(key, value, metadata, Split(0, self.ep_size, self.ep_rank))


def _infer_ep_size(key: str, value: Any, metadata: Metadata, ep_rank: int) -> int:
    """Return how many ranks' experts a stored tensor has, by those of this rank; 1 without an axis of experts."""
    if not isinstance(value, torch.Tensor) or not value.dim() or key not in metadata.state_dict_metadata:
        return ep_rank + 1
    stored, held = tuple(get_stored_tensor(key, metadata).size), tuple(value.shape)
    if stored == held:  # all experts: any size above 1 says so
        return max(2, ep_rank + 1)
    count, rest = divmod(stored[0], held[0]) if stored and held[0] else (0, 1)
    if rest or ep_rank >= count:
        raise ShardingError(
            f"{key!r} is stored with shape {stored}, and this rank, {ep_rank} of the expert-parallel ones, has {held}: "
            "ranks have different numbers of experts, or the tensor is not an expert's; pass ep_size="
        )
    return count


def _layout_by_rank(key: str, value: Any, metadata: Metadata, split: Split) -> ExpertLayout | None:
    """Return the layout of a rank's part of a stored tensor; None if the value has no axis of experts, or all."""
    if not isinstance(value, torch.Tensor) or key not in metadata.state_dict_metadata:
        return None
    shape = tuple(get_stored_tensor(key, metadata).size)
    # a tensor of the stored shape on one of several ranks holds all experts
    if not shape or (tuple(value.shape) == shape and split.count > 1):
        return None
    found = list_held_boxes(shape, [split])
    box = found[0].box if found else make_empty_box(shape, [split])
    if tuple(value.shape) != box.shape:
        raise ShapeMismatchError(
            f"{key!r} is stored with shape {shape}, and rank {split.index} of {split.count} has {box.shape} of it; the "
            f"tensor to be filled has {tuple(value.shape)}"
        )
    if not isinstance(value, DTensor):
        return ExpertLayout(shape, box)
    if value.device_mesh.get_coordinate() is None:
        return ExpertLayout(shape, box, inside=False)
    return ExpertLayout(shape, box, tuple(get_dtensor_splits(key, value)), get_replica_coordinates(value))


def _find_expert_dim(tensor: torch.Tensor, expert_dim: int) -> int:
    """Return the axis that counts experts, from the front; raise ShardingError if the tensor has no such axis."""
    if not -tensor.dim() <= expert_dim < tensor.dim():
        raise ShardingError(
            f"expert_dim={expert_dim}: a tensor of shape {tuple(tensor.shape)} has no such axis: leave a tensor "
            "without experts, such as the optimizer's step, as it is"
        )
    return expert_dim % tensor.dim()


def _find_mesh(parallel_state: Any, ep: Names, experts: Collection[torch.Tensor]) -> DeviceMesh:
    """Return the mesh with the expert-parallel dimension: a trainer's parallel state has it, or else the experts."""
    if isinstance(parallel_state, DeviceMesh):
        return parallel_state
    seen = dict(_list_meshes(parallel_state))
    found = [mesh for mesh in seen.values() if isinstance(mesh, DeviceMesh) and has_mesh_dim(mesh, ep)]
    if not found:
        # it knows sizes alone: no mesh is made of them, since they do not say the order of the ranks
        sharded = [get_root_mesh(param.device_mesh) for param in experts if isinstance(param, DTensor)]
        found = [mesh for mesh in sharded if has_mesh_dim(mesh, ep)]
    largest: list[DeviceMesh] = []
    for mesh in found:
        if mesh.ndim == max(each.ndim for each in found) and mesh not in largest:
            largest.append(mesh)
    if len(largest) != 1:
        names = (ep,) if isinstance(ep, str) else ep
        described = ", ".join(
            f"{name} {each.mesh_dim_names if isinstance(each, DeviceMesh) else repr(each)}"
            for name, each in seen.items()
        )
        raise ShardingError(
            f"parallel_state={parallel_state!r:.80} has {len(largest)} meshes with a dimension "
            f"{' or '.join(map(repr, names))} among its attributes ({described or 'no mesh at all'}): pass the "
            "mesh that the model was sharded on, or the name of its dimension as ep="
        )
    return largest[0]


def _list_meshes(parallel_state: Any) -> Iterator[tuple[str, DeviceMesh | Exception]]:
    """List a trainer's meshes: values of a dict, or attributes and the results or errors of ``get_..._mesh()``."""
    # by their type, not by a name: MindSpeed and VeOmni have renamed them from release to release
    is_dict = isinstance(parallel_state, dict)
    values: dict[str, Any] = dict(parallel_state if is_dict else getattr(parallel_state, "__dict__", {}))
    for name in dir(type(parallel_state)):
        if "mesh" not in name or name.startswith("_") or name in values:
            continue
        try:
            value = getattr(parallel_state, name)
            # other methods are not called: they may make a mesh, and so wait for other ranks
            if name.startswith("get_") and _takes_nothing(value):
                values[f"{name}()"] = value()
            else:
                values[name] = value
        except Exception as exc:  # noqa: BLE001 - one of a dimension that this job does not have
            yield name, exc
    for name, value in values.items():
        for key, mesh in value.items() if isinstance(value, dict) else [(None, value)]:
            if isinstance(mesh, DeviceMesh):
                yield name if key is None else f"{name}[{key!r}]", mesh


def _takes_nothing(method: Any) -> bool:
    """Return whether a method can be called without arguments."""
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return False
    return True


def _get_patterns(ep_plan: Any) -> str | Collection[str]:
    """Return the name patterns of a plan, or in a trainer's plan object."""
    patterns = getattr(ep_plan, "apply_modules", ep_plan)
    if not isinstance(patterns, (str, Collection)) or not all(isinstance(each, str) for each in patterns):
        raise ShardingError(
            f"ep_plan={ep_plan!r:.80}: expected patterns of module names, such as 'layers.{{*}}.mlp.experts', or an "
            "object with these as apply_modules"
        )
    return patterns


def _is_part(mesh: DeviceMesh, full: DeviceMesh) -> bool:
    """Return whether a mesh is the full one, or its slice through this rank along some of its dimensions."""
    names, all_names = mesh.mesh_dim_names or (), full.mesh_dim_names or ()
    if not names or not set(names) <= set(all_names):
        return False
    here = full.get_coordinate()
    kept = [dim for dim, name in enumerate(all_names) if name in names]
    if here is None or [all_names[dim] for dim in kept] != list(names):
        return mesh == full
    place = tuple(slice(None) if dim in kept else index for dim, index in enumerate(here))
    return mesh.mesh.equal(full.mesh[place])


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
    found: dict[int, Placement] = {}
    for dim, place in enumerate(tensor.placements):
        # by their ranks: a mesh of FSDP alone may name its dimensions otherwise than the full mesh does
        ranks = _ranks_along(tensor.device_mesh, dim)
        same = [other for other in range(mesh.ndim) if other not in found and _ranks_along(mesh, other) == ranks]
        if not same:
            raise ShardingError(
                f"the tensor is sharded over ranks {ranks}, which no dimension of the mesh {mesh.mesh_dim_names} "
                f"{mesh.mesh.tolist()} has: pass the mesh that the model was sharded on"
            )
        found[same[0]] = place
    return found


def _ranks_along(mesh: DeviceMesh, dim: int) -> list[int]:
    """Return the ranks along a mesh dimension through this rank."""
    here = mesh.get_coordinate() or (0,) * mesh.ndim
    place = tuple(slice(None) if other == dim else index for other, index in enumerate(here))
    return mesh.mesh[place].tolist()


__all__ = [
    "EPLoadPlanner",
    "EPSpecInfo",
    "build_ep_fqn2spec_info",
    "cleanup_old_checkpoints",
    "create_default_local_load_plan_with_moe",
    "dcp_to_torch_state_dict",
    "drop_ep_dim",
    "empty_cache",
    "get_check_moe_func",
    "get_chunk_readitem",
    "get_dtype_size",
    "get_shard_info",
    "restore_ep_dim",
    "save_state_dict",
    "synchronize",
]
