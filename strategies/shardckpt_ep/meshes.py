"""Device meshes by the names of their dimensions: where this rank is, and whether two meshes fit each other."""

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

#: One name of a mesh dimension, or those of which one is to be there.
Names: TypeAlias = "str | Sequence[str]"

#: Names of the mesh dimension whose ranks have different experts.
EP_NAMES: Names = ("ep",)
#: Names of the mesh dimension whose ranks have parts of the same experts: of MindSpeed, VeOmni, torchtitan.
FSDP_NAMES: Names = ("efsdp", "ep_fsdp", "dp_shard_mod_ep")


def mesh_dim(mesh: DeviceMesh, names: Names) -> int:
    """The mesh dimension of one of these names.

    Raises:
        ShardingError: there is none, or there are several.
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    present = mesh.mesh_dim_names or ()
    found = [name for name in wanted if name in present]
    if len(found) != 1:
        raise ShardingError(
            f"the mesh has the dimensions {present or 'without names'}, of which one, and not {len(found)}, must be "
            f"called {' or '.join(map(repr, wanted))}: name the dimensions in init_device_mesh, or give the name here"
        )
    return present.index(found[0])


def has_dim(mesh: DeviceMesh, names: Names) -> bool:
    """Whether the mesh has a dimension of one of these names."""
    wanted = (names,) if isinstance(names, str) else names
    return any(name in (mesh.mesh_dim_names or ()) for name in wanted)


def gather_experts_per_rank(experts: int, mesh: DeviceMesh, ep: Names = EP_NAMES) -> tuple[int, ...]:
    """How many experts every rank of the expert-parallel dimension has; all ranks of the mesh call it.

    Args:
        experts: How many this rank has.
        mesh: The mesh; ranks outside get nothing back, ().
        ep: Its expert-parallel dimension.
    """
    if mesh.get_coordinate() is None:
        return ()
    return tuple(Comm(mesh.get_group(mesh_dim(mesh, ep))).all_gather(experts))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or a plain tensor itself; outside autograd, in the caller's memory."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    with torch.no_grad():
        local = tensor.to_local()
    wait = getattr(local, "wait", None)  # a collective may still fill it
    return (local if wait is None else wait()).detach()


def replica_inside(dtensor: DTensor) -> Ints:
    """This rank's coordinates on those dimensions of a DTensor's mesh that replicate it."""
    here = dtensor.device_mesh.get_coordinate() or ()
    return tuple(index for place, index in zip(dtensor.placements, here, strict=False) if isinstance(place, Replicate))


def replica_outside(inner: DeviceMesh, mesh: DeviceMesh, ep_dim: int, name: str) -> Ints:
    """This rank's coordinates on those mesh dimensions that neither separate experts nor belong to the inner mesh.

    The ranks of the inner mesh must be those that some of the other dimensions of the mesh lead to from here; of a
    mesh that has the expert-parallel dimension alone, they must all be others than those that it leads to.

    Args:
        inner: The mesh of a DTensor that holds one rank's experts.
        mesh: The whole mesh, or the expert-parallel one; this rank is in it.
        ep_dim: Its expert-parallel dimension.
        name: The DTensor's, for errors.

    Raises:
        ShardingError: they are others: the mesh is not the one that the DTensor lives on.
    """
    here = mesh.get_coordinate() or ()
    held = set(inner.mesh.flatten().tolist())
    others = [dim for dim in range(mesh.ndim) if dim != ep_dim]
    shared = [dim for dim in others if _ranks(mesh, here, [dim]) <= held]
    fits = _ranks(mesh, here, shared) == held
    if not others:
        fits = held & _ranks(mesh, here, [ep_dim]) == {mesh.get_rank()}
    if not fits:
        raise ShardingError(
            f"{name!r}: the tensor lies on ranks {sorted(held)} by its own mesh, but in the mesh "
            f"{mesh.mesh_dim_names} given for it ranks {sorted(_ranks(mesh, here, [ep_dim]))} have different experts "
            f"and ranks {sorted(_ranks(mesh, here, others))} the same: give the mesh that the model was sharded on, "
            "not one made anew from its sizes"
        )
    return tuple(here[dim] for dim in others if dim not in shared)


def _ranks(mesh: DeviceMesh, here: Ints, dims: Sequence[int]) -> set[int]:
    """The ranks that differ from this one along some dimensions alone."""
    place = tuple(slice(None) if dim in dims else index for dim, index in enumerate(here))
    return set(mesh.mesh[place].flatten().tolist())


__all__ = [
    "EP_NAMES",
    "FSDP_NAMES",
    "Names",
    "gather_experts_per_rank",
    "has_dim",
    "local_of",
    "mesh_dim",
    "replica_inside",
    "replica_outside",
]
