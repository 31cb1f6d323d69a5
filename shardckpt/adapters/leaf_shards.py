"""The shards of leaves that a job saves again and again: described once, as long as the leaves stay the same."""

from __future__ import annotations

from itertools import repeat
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import AlikeTensors
from shardckpt.adapters.leaves import describe_leaf
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.torch_private import read_local_tensors, read_specs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from shardckpt.mapping.base import Replicated

#: Classes of leaves whose shards follow from what :class:`_Form` has; others are described in each save.
_KNOWN = frozenset((*ORDINARY, DTensor))


class _Form(NamedTuple):
    """All that the shards of leaves depend on, but for their values.

    Attributes:
        specs: The mesh, the placements, the shape and the dtype of each DTensor, as DTensors have them: an object that
            torch replaces, and does not change. It has no values. The shape and dtype of the local tensor follow from
            it: where they do not, the save refuses the shard, whose data is not what it says. None for other leaves.
        shapes: The shape of each leaf that is no DTensor.
        dtypes: Its dtype.
        options: What else they depend on.
    """

    names: list[str]
    specs: list[Any]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    options: tuple[Any, ...]

    def is_like(self, other: _Form) -> bool:
        """Return whether leaves of the other form have the same shards."""
        return (
            self.names == other.names  # the same list, where the caller has compared them
            and all(map(is_, self.specs, other.specs))
            and self.shapes == other.shapes
            and self.dtypes == other.dtypes
            and self.options == other.options
        )


class LeafShards:
    """Describes the leaves of a state in each save; those of the last save again where the leaves are like its leaves.

    To describe 20,000 tensors takes several times as long as to copy them. What is kept between two saves has no
    tensors: they would stay in memory when the model is gone.

    For saves only: a load returns the shards' own tensors, and not the DTensors that a module has.
    """

    def __init__(self) -> None:
        self._form: _Form | None = None
        #: The description of each leaf by name; None for leaves that are described in each save.
        self._described: dict[str, ShardedTensor | None] = {}
        #: Whether there are no such leaves.
        self._has_all = False

    def describe(
        self, leaves: Mapping[str, Any], prefix: str, replicated: Replicated, unchecked: AbstractSet[str] = frozenset()
    ) -> dict[str, Any]:
        """Return the shards of leaves by name, each as :func:`describe_leaf` makes it, with factories built.

        They have the memory of the leaves, and are this object's until :meth:`release`. A leaf that is several boxes
        has a list.
        """
        options = (prefix, replicated, unchecked)
        found = self.find(list(leaves), list(leaves.values()), *options)
        if found is None:
            form, locals_ = _read_form(list(leaves), list(leaves.values()), options)
            self._form, self._described = None, {}  # until none of them is refused
            found = _describe_each(leaves, *options)
            if form is not None:
                self._keep(form, locals_, found)
        return found

    def find(
        self,
        names: list[str],
        leaves: list[Any],
        prefix: str,
        replicated: Replicated,
        unchecked: AbstractSet[str] = frozenset(),
    ) -> dict[str, Any] | None:
        """Return what :meth:`describe` returns for leaves that are like those of the last save; None for others.

        The arguments are those of that method, but for the names and leaves in two lists.
        """
        if self._form is None or names != self._form.names:
            return None
        options = (prefix, replicated, unchecked)
        form, locals_ = _read_form(names, leaves, options)
        if form is None or not form.is_like(self._form):
            return None
        found = dict(self._described)
        shards, rest = list(found.values()), {}
        if not self._has_all:
            rest = {name: leaf for name, leaf, shard in zip(names, leaves, shards, strict=True) if shard is None}
            kept = [pair for pair in zip(shards, locals_, strict=True) if pair[0] is not None]
            shards, locals_ = [shard for shard, _ in kept], [local for _, local in kept]
        # to detach a tensor takes longer than to ask; DTensors have theirs detached
        if form.shapes and any(map(attrgetter("requires_grad"), locals_)):
            locals_ = [local.detach() if local.requires_grad else local for local in locals_]
        for shard, local in zip(shards, locals_, strict=True):
            shard.data = local  # type: ignore[union-attr] # those that are kept
        return found | _describe_each(rest, *options) if rest else found

    def release(self) -> None:
        """Let go of the tensors; what :meth:`describe` has returned must not be used any more."""
        for shard in self._described.values():
            if shard is not None:
                shard.data = None

    def _keep(self, form: _Form, locals_: list[torch.Tensor], described: dict[str, Any]) -> None:
        """Keep the descriptions for the next save, but those of leaves that are not one box."""
        self._form = form
        self._described = {
            name: shard if type(shard) is ShardedTensor and _is_all(shard, local) else None
            for (name, shard), local in zip(described.items(), locals_, strict=True)
        }
        kept = [shard for shard in self._described.values() if shard is not None]
        self._has_all = len(kept) == len(self._described)
        for shard in kept:
            shard.fix_fields()


def _read_form(
    names: list[str], values: list[Any], options: tuple[Any, ...]
) -> tuple[_Form | None, list[torch.Tensor]]:
    """Return the form of leaves, or None if one is of another class; and their local tensors."""
    kinds = list(map(type, values))
    if not set(kinds) <= _KNOWN:
        return None, []
    specs, locals_ = list[Any](repeat(None, len(values))), values
    plain = values
    if DTensor in kinds:
        is_sharded = [kind is DTensor for kind in kinds]
        plain = [] if all(is_sharded) else [v for v, sharded in zip(values, is_sharded, strict=True) if not sharded]
        dtensors = values if not plain else [v for v, sharded in zip(values, is_sharded, strict=True) if sharded]
        found = read_local_tensors(dtensors)
        if not set(map(type, found)) <= set(ORDINARY):  # an AsyncCollectiveTensor is to be waited for
            return None, []
        specs, locals_ = read_specs(dtensors), found
        if plain:
            from_each = iter(zip(specs, found, strict=True))
            pairs = [next(from_each) if sharded else (None, v) for v, sharded in zip(values, is_sharded, strict=True)]
            specs, locals_ = [spec for spec, _ in pairs], [local for _, local in pairs]
    try:
        shapes = list(map(torch.Tensor.size, plain))
    except RuntimeError:  # nested tensors have none
        return None, []
    dtypes = list(map(attrgetter("dtype"), plain))
    return _Form(names, specs, shapes, dtypes, (*options, *_find_ranks())), locals_


def _find_ranks() -> tuple[int, int]:
    """Return this rank and the number of ranks: descriptions have them, and a job may make another group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _is_all(shard: ShardedTensor, local: torch.Tensor) -> bool:
    """Return whether the data of a shard is a local tensor, as it is."""
    return shard.data is not None and shard.data.shape == local.shape and shard.flattened_range is None


def _describe_each(
    leaves: Mapping[str, Any], prefix: str, replicated: Replicated, unchecked: AbstractSet[str]
) -> dict[str, Any]:
    alike = AlikeTensors()
    found = {}
    for name, leaf in leaves.items():
        shard = describe_leaf(
            leaf, f"{prefix}{name}", "unchecked" if name in unchecked else replicated, alike=alike, detached=True
        )
        if isinstance(shard, ShardedTensorFactory):
            shards = shard.build()
            shard = shards[0] if isinstance(shards, list) and len(shards) == 1 else shards
        found[name] = shard
    return found
