"""The layouts of all experts of a model, by the places of their modules."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from shardckpt.errors import ShardingError, listed
from shardckpt_ep.layout import ExpertLayout
from shardckpt_ep.meshes import EP_NAMES, FSDP_NAMES, has_dim
from shardckpt_ep.names import clean

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from shardckpt_ep.meshes import Names


#: Modules that an error names.


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
    """The layout of every parameter of a model's expert modules, by its name without wrappers.

    Each rank does it for itself: where one raises, the others must hear of it. Buffers have no layout; one that is a
    rank's own takes :meth:`ExpertLayout.from_local`.

    A DTensor with the expert-parallel mesh dimension is taken as it is, one without it as FSDP's part of this rank's
    experts, and a plain tensor as this rank's experts.

    Args:
        model: The model, or a part of it.
        mesh: The mesh with the expert-parallel dimension.
        modules: Places of modules with experts, from any parent on; ``*`` stands for one name: ``"layers.*.experts"``.
            A pipeline stage without experts names none: ``()``.
        ep: See :class:`ExpertLayout`, as all that follow.
        fsdp: For plain tensors.
        fsdp_dim: For plain tensors.
        expert_dim: The axis that counts experts.
        experts_per_rank: Where experts are dealt out unevenly.
        global_shapes: Shapes with all experts, by parameter, where they cannot be worked out.

    Raises:
        ShardingError: a parameter does not lie as the mesh says, or no parameter is in any such place.
    """
    places = (modules,) if isinstance(modules, str) else tuple(modules)
    found: dict[str, ExpertLayout] = {}
    for name, param in expert_parameters(model, places):
        shape = (global_shapes or {}).get(name)
        if isinstance(param, DTensor) and has_dim(param.device_mesh, ep):
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
            f"no parameter of the model is in a module at {', '.join(map(repr, places))}; there are "
            f"{listed(sorted({name.rpartition('.')[0] for name, _ in model.named_parameters()}), limit=8)}"
        )
    return found


def expert_parameters(model: Module, modules: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of expert modules, by their names without wrappers."""
    for name, param in model.named_parameters():
        fqn = clean(name)
        parents = fqn.split(".")[:-1]
        if any(_is_at(parents[:end], place) for end in range(1, len(parents) + 1) for place in modules):
            yield fqn, param


def _is_at(path: Sequence[str], place: str) -> bool:
    """Whether the last names of a path are those of a place."""
    wanted = place.split(".")
    tail = path[-len(wanted) :]
    return len(tail) == len(wanted) and all(map(fnmatchcase, tail, wanted))


__all__ = ["expert_layouts", "expert_parameters"]
