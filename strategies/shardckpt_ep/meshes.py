"""Device meshes by the names of their dimensions: this rank's coordinates, and whether two meshes agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate

from shardckpt.distributed import Comm
from shardckpt.errors import ShardingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from shardckpt.planning import Ints

#: The name of a mesh dimension, or several, of which the mesh must have exactly one.
Names: TypeAlias = "str | Sequence[str]"

#: Names of the mesh dimension whose ranks have different experts.
EP_NAMES: Names = ("ep",)
#: Names of the mesh dimension whose ranks have parts of the same experts, as MindSpeed, VeOmni and torchtitan call it.
FSDP_NAMES: Names = ("efsdp", "ep_fsdp", "dp_shard_mod_ep")


def find_mesh_dim(mesh: DeviceMesh, names: Names) -> int:
    """Return the index of the mesh dimension that has one of these names.

    Raises:
        ShardingError: none has, or several have.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    present = mesh.mesh_dim_names or ()
    found = [name for name in wanted if name in present]
    if len(found) != 1:
        raise ShardingError(
            f"the mesh has the dimensions {present or 'without names'}, of which one, and not {len(found)}, must be "
            f"called {' or '.join(map(repr, wanted))}: name the dimensions in init_device_mesh, or pass the name here"
        )
    return present.index(found[0])


def has_mesh_dim(mesh: DeviceMesh, names: Names) -> bool:
    """Return whether the mesh has a dimension with one of these names."""
    wanted = (names,) if isinstance(names, str) else names
    return any(name in (mesh.mesh_dim_names or ()) for name in wanted)


def gather_experts_per_rank(experts: int, mesh: DeviceMesh, ep: Names = EP_NAMES) -> tuple[int, ...]:
    """Collective: return the number of experts of every rank along the expert-parallel dimension.

    Args:
        experts: Number of experts of this rank.
        mesh: The mesh; all its ranks call this.
        ep: Name of its expert-parallel dimension.

    Returns:
        One number for each rank of that dimension, in order; empty on a rank outside the mesh.
    """
    if mesh.get_coordinate() is None:
        return ()
    return tuple(Comm(mesh.get_group(find_mesh_dim(mesh, ep))).all_gather(experts))


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or a plain tensor itself: detached, in the caller's memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # an asynchronous collective may still be filling it
    return (local if wait is None else wait()).detach()


def get_replica_coordinates(dtensor: DTensor) -> Ints:
    """Return this rank's coordinates along the dimensions of a DTensor's mesh that replicate it."""
    here = dtensor.device_mesh.get_coordinate() or ()
    return tuple(index for place, index in zip(dtensor.placements, here, strict=False) if isinstance(place, Replicate))


def get_outer_replica_coordinates(inner: DeviceMesh, mesh: DeviceMesh, ep_dim: int, name: str) -> Ints:
    """Return this rank's coordinates along the mesh dimensions that hold copies of a DTensor on an inner mesh.

    These are the dimensions that neither split experts nor are covered by the inner mesh. The inner mesh must consist
    of the ranks along some of the other dimensions of ``mesh``. If ``mesh`` has the expert-parallel dimension alone,
    the two must have only this rank in common.

    Args:
        inner: The mesh of a DTensor that holds one rank's experts.
        mesh: The full mesh, or one with the expert-parallel dimension alone; this rank is in it.
        ep_dim: Index of its expert-parallel dimension.
        name: The DTensor's name, for errors.

    Returns:
        The coordinates, in the order of the dimensions.

    Raises:
        ShardingError: the meshes do not match: the DTensor was sharded on another mesh.
    """
    here = mesh.get_coordinate() or ()
    inner_ranks = set(inner.mesh.flatten().tolist())
    others = [dim for dim in range(mesh.ndim) if dim != ep_dim]
    shared = [dim for dim in others if _ranks_along(mesh, here, [dim]) <= inner_ranks]
    matches = _ranks_along(mesh, here, shared) == inner_ranks
    if not others:
        matches = inner_ranks & _ranks_along(mesh, here, [ep_dim]) == {mesh.get_rank()}
    if not matches:
        raise ShardingError(
            f"{name!r}: the tensor's own mesh has ranks {sorted(inner_ranks)}, but in the mesh {mesh.mesh_dim_names} "
            f"that was passed ranks {sorted(_ranks_along(mesh, here, [ep_dim]))} have different experts and ranks "
            f"{sorted(_ranks_along(mesh, here, others))} the same: pass the mesh that the model was sharded on, not a "
            "new one of the same sizes"
        )
    return tuple(here[dim] for dim in others if dim not in shared)


def _ranks_along(mesh: DeviceMesh, here: Ints, dims: Sequence[int]) -> set[int]:
    """Return the ranks whose coordinates differ from this rank's along these dimensions at most."""
    place = tuple(slice(None) if dim in dims else index for dim, index in enumerate(here))
    return set(mesh.mesh[place].flatten().tolist())


__all__ = [
    "EP_NAMES",
    "FSDP_NAMES",
    "Names",
    "find_mesh_dim",
    "gather_experts_per_rank",
    "get_local_tensor",
    "get_outer_replica_coordinates",
    "get_replica_coordinates",
    "has_mesh_dim",
]
