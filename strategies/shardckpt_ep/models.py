"""The layouts of all expert parameters of a model, found by the names of their modules."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from shardckpt.errors import ShardingError, listed
from shardckpt_ep.layout import ExpertLayout
from shardckpt_ep.meshes import EP_NAMES, FSDP_NAMES, has_mesh_dim
from shardckpt_ep.names import clean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from shardckpt_ep.meshes import Names


def expert_layouts(
    model: Module,
    mesh: DeviceMesh,
    modules: str | Collection[str],
    *,
    ep: Names = EP_NAMES,
    fsdp: Names = FSDP_NAMES,
    fsdp_dim: int | None = None,
    expert_dim: int = 0,
    experts_per_rank: Sequence[int] | None = None,
    global_shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, ExpertLayout]:
    """Return the layout of every parameter of a model's expert modules.

    A DTensor with the expert-parallel mesh dimension defines its layout itself. A DTensor without it is taken as FSDP's
    part of this rank's experts, a plain tensor as this rank's experts. Buffers get no layout: for one with experts add
    :meth:`ExpertLayout.from_local`.

    It is not collective, and may raise on one rank alone: call it where an error reaches the other ranks.

    Args:
        model: The model, or a part of it.
        mesh: The mesh with the expert-parallel dimension.
        modules: Names of the modules with experts, or the last parts of them; ``*`` matches one part:
            ``"layers.*.experts"``. A pipeline stage without experts passes ``()``.
        ep: Name of that dimension; see :meth:`ExpertLayout.from_local` for this and all arguments that follow.
        fsdp: For plain tensors.
        fsdp_dim: For plain tensors.
        expert_dim: The axis that counts experts.
        experts_per_rank: Needed where ranks have different numbers of experts.
        global_shapes: Shapes with all experts, by parameter, where they cannot be computed.

    Returns:
        Layouts by parameter name; wrappers such as ``_orig_mod`` are left out of the names.

    Raises:
        ShardingError: a parameter's shape contradicts the mesh, or no module has such a name.

    Example::

        layouts = expert_layouts(model, mesh, "layers.*.moe.experts")
    """
    places = (modules,) if isinstance(modules, str) else tuple(modules)
    found: dict[str, ExpertLayout] = {}
    for name, param in expert_parameters(model, places):
        shape = (global_shapes or {}).get(name)
        if isinstance(param, DTensor) and has_mesh_dim(param.device_mesh, ep):
            found[name] = ExpertLayout.from_dtensor(param, expert_dim=expert_dim, name=name)
        elif isinstance(param, DTensor):
            found[name] = ExpertLayout.from_efsdp(
                param,
                mesh,
                ep=ep,
                expert_dim=expert_dim,
                experts_per_rank=experts_per_rank,
                global_shape=shape,
                name=name,
            )
        else:
            found[name] = ExpertLayout.from_local(
                param,
                mesh,
                ep=ep,
                fsdp=fsdp,
                fsdp_dim=fsdp_dim,
                expert_dim=expert_dim,
                experts_per_rank=experts_per_rank,
                global_shape=shape,
                name=name,
            )
    if places and not found:
        raise ShardingError(
            f"no parameter of the model is in a module at {', '.join(map(repr, places))}; its modules are "
            f"{listed(sorted({name.rpartition('.')[0] for name, _ in model.named_parameters()}), limit=8)}"
        )
    return found


def expert_parameters(model: Module, modules: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of expert modules, each with its name without wrappers.

    Args:
        model: The model.
        modules: As for :func:`expert_layouts`.
    """
    for name, param in model.named_parameters():
        fqn = clean(name)
        parents = fqn.split(".")[:-1]
        if any(_ends_with(parents[:end], place) for end in range(1, len(parents) + 1) for place in modules):
            yield fqn, param


def _ends_with(path: Sequence[str], pattern: str) -> bool:
    """Return whether the last parts of a path match a pattern."""
    wanted = pattern.split(".")
    tail = path[-len(wanted) :]
    return len(tail) == len(wanted) and all(map(fnmatchcase, tail, wanted))


__all__ = ["expert_layouts", "expert_parameters"]
