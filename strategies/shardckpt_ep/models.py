"""The layouts of all expert parameters of a model, found by the names of their modules."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from torch.distributed.tensor import DTensor

from shardckpt.errors import ShardingError, listed
from shardckpt_ep.layout import ExpertLayout
from shardckpt_ep.meshes import EP_NAMES, FSDP_NAMES, has_mesh_dim
from shardckpt_ep.names import clean

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

    from shardckpt_ep.meshes import Names

#: A number, or a range with both its ends.
_NUMBERS = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


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
            ``"layers.*.experts"``. MindSpeed's ``{*}`` is ``*``; ``{0-5}`` is each number from 0 to 5, ``{0,2-4}`` each
            that it lists. Each must match: a pipeline stage passes its own experts' names, or ``()``.
        ep: Name of that dimension; see :meth:`ExpertLayout.from_local` for this and all arguments that follow.
        fsdp: For plain tensors.
        fsdp_dim: For plain tensors.
        expert_dim: The axis that counts experts.
        experts_per_rank: Needed where ranks have different numbers of experts.
        global_shapes: Shapes with all experts, by parameter, where they cannot be computed.

    Returns:
        Layouts by parameter name; wrappers such as ``_orig_mod`` are left out of the names. All names of a tied
        parameter have one layout.

    Raises:
        ShardingError: a parameter's shape contradicts the mesh, no module has one of the names, or braces hold
            something else.

    Example::

        layouts = expert_layouts(model, mesh, "layers.*.moe.experts")
    """
    found: dict[str, ExpertLayout] = {}
    first: dict[int, str] = {}
    for name, param in expert_parameters(model, modules):
        if (tied := first.setdefault(id(param), name)) != name:
            found[name] = found[tied] = replace(found[tied], tied=tied)
            continue
        if isinstance(param, DTensor) and has_mesh_dim(param.device_mesh, ep):
            found[name] = ExpertLayout.from_dtensor(param, expert_dim=expert_dim, name=name)
            continue
        options: dict[str, Any] = {
            "ep": ep,
            "expert_dim": expert_dim,
            "experts_per_rank": experts_per_rank,
            "global_shape": (global_shapes or {}).get(name),
            "name": name,
        }
        if isinstance(param, DTensor):
            found[name] = ExpertLayout.from_efsdp(param, mesh, **options)
        else:
            found[name] = ExpertLayout.from_local(param, mesh, fsdp=fsdp, fsdp_dim=fsdp_dim, **options)
    return found


def expert_parameters(
    model: Module, modules: str | Collection[str], *, each: bool = True
) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters of expert modules, each with its name without wrappers.

    Args:
        model: The model.
        modules: As for :func:`expert_layouts`.
        each: Whether each of the names must belong to a module; else one must.

    Raises:
        ShardingError: one of the names is of no module with a parameter, or braces hold no numbers.
    """
    places = (modules,) if isinstance(modules, str) else tuple(modules)
    patterns = {place: [_expand_braces(part, place) for part in place.split(".")] for place in places}
    unused = dict.fromkeys(places)
    found: list[tuple[str, torch.Tensor]] = []
    for name, param in model.named_parameters(remove_duplicate=False):  # a state dict has each name of a tied one
        fqn = clean(name)
        path = fqn.split(".")[:-1]
        matching = [place for place, pattern in patterns.items() if _passes(path, pattern)]
        if matching:
            found.append((fqn, param))
        for place in matching:
            unused.pop(place, None)
    if unused and (each or not found):
        raise ShardingError(
            f"no parameter of the model is in a module at {', '.join(map(repr, unused))}; its modules are "
            f"{listed(sorted({name.rpartition('.')[0] for name, _ in model.named_parameters()}), limit=8)}"
        )
    return found


def _expand_braces(part: str, place: str) -> list[str]:
    """Return the patterns, as ``fnmatch`` takes them, that a part of a pattern stands for.

    Braces that hold something else than ``*`` or numbers would match nothing: they are a ShardingError.
    """
    pieces = re.split(r"\{([^{}]*)\}", part)  # every second one was in braces
    choices = [_read_numbers(piece, place) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _read_numbers(braces: str, place: str) -> list[str]:
    if braces == "*":
        return ["*"]
    numbers: list[str] = []
    for each in braces.split(","):
        ends = _NUMBERS.fullmatch(each.strip())
        counted = ends and range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        if not counted:  # also of {5-2}, which has no number
            raise ShardingError(f"{place!r}: {{{braces}}} is neither {{*}} nor numbers, as {{0-5}} or {{0,2-4}}")
        numbers += map(str, counted)
    return numbers


def _passes(path: Sequence[str], pattern: Sequence[Collection[str]]) -> bool:
    """Return whether parts of a path that follow each other match a pattern, each one of the choices for it."""
    starts = range(len(path) - len(pattern) + 1)
    return any(
        all(any(fnmatchcase(path[start + n], choice) for choice in choices) for n, choices in enumerate(pattern))
        for start in starts
    )
