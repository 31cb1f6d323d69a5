"""Device meshes by the names of their dimensions: this rank's coordinates, and whether two meshes agree."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from shardckpt.distributed import Comm
from shardckpt.errors import ShardingError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh

    from shardckpt.planning import Ints

#: The name of a mesh dimension, or several; the mesh must have exactly one of them.
Names: TypeAlias = "str | Sequence[str]"

#: Names of the mesh dimension whose ranks have different experts.
EP_NAMES: Names = ("ep",)
#: Names of the mesh dimension whose ranks have parts of the same experts, as MindSpeed, VeOmni and torchtitan call it.
FSDP_NAMES: Names = ("efsdp", "ep_fsdp", "dp_shard_mod_ep")


def find_mesh_dim(mesh: DeviceMesh, names: Names) -> int:
    """Return the index of the mesh dimension that has one of these names; a ShardingError if none or several have."""
    found = _find_dims(mesh, names)
    if len(found) != 1:
        accepted = (names,) if isinstance(names, str) else names
        raise ShardingError(
            f"exactly one dimension of the mesh must be called {' or '.join(map(repr, accepted))}, and {len(found)} of "
            f"{mesh.mesh_dim_names or 'its dimensions without names'} are: name the dimensions in init_device_mesh, or "
            "pass the name here"
        )
    return found[0]


def has_mesh_dim(mesh: DeviceMesh, names: Names) -> bool:
    """Return whether the mesh has a dimension with one of these names."""
    return bool(_find_dims(mesh, names))


def _find_dims(mesh: DeviceMesh, names: Names) -> list[int]:
    accepted = (names,) if isinstance(names, str) else names
    return [dim for dim, name in enumerate(mesh.mesh_dim_names or ()) if name in accepted]


def gather_experts_per_rank(experts: int, mesh: DeviceMesh, ep: Names = EP_NAMES) -> tuple[int, ...]:
    """Collective: return the number of experts of every rank along the expert-parallel dimension, in order.

    ``experts`` is this rank's number. A rank outside the mesh gets ``()``.
    """
    if mesh.get_coordinate() is None:
        return ()
    return tuple(Comm(mesh.get_group(find_mesh_dim(mesh, ep))).all_gather(experts))


def get_outer_replica_coordinates(inner: DeviceMesh, mesh: DeviceMesh, ep_dim: int, name: str) -> Ints:
    """Return this rank's coordinates along the dimensions of ``mesh`` that hold copies of a DTensor on an inner mesh.

    These are all but the expert-parallel dimension and the dimensions that form the inner mesh. Where ``mesh`` has the
    expert-parallel dimension alone, the two must have only this rank in common. A ShardingError if they do not match:
    the DTensor was sharded on another mesh.
    """
    here = mesh.get_coordinate() or ()
    inner_ranks = set(inner.mesh.flatten().tolist())
    others = [dim for dim in range(mesh.ndim) if dim != ep_dim]
    # ranks are compared, not names or sizes: two meshes of the same sizes may list the job's ranks in another order
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
    """Return the ranks that differ from this one in their coordinates along these dimensions alone."""
    place = tuple(slice(None) if dim in dims else index for dim, index in enumerate(here))
    return set(mesh.mesh[place].flatten().tolist())
