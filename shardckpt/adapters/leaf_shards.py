"""Describe the leaves that each save of a job has; reuse descriptions while shapes, dtypes and shardings stay."""

from __future__ import annotations

from itertools import compress
from operator import attrgetter, is_, not_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.adapters.dtensor import LayoutCache
from shardckpt.adapters.leaves import describe_leaf
from shardckpt.distributed.comm import rank_and_size
from shardckpt.mapping.factory import ShardedTensorFactory
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.tensors.memory import ORDINARY
from shardckpt.tensors.torch_private import read_local_tensors, read_specs

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from shardckpt.mapping.base import Replicated

#: Classes of leaves whose shards a :class:`_Signature` determines. A leaf of another class stops the reuse of them all.
_CLASSES = frozenset((*ORDINARY, DTensor))


class _Options(NamedTuple):
    """The arguments of a description: see :meth:`LeafShards.describe`."""

    prefix: str
    replicated: Replicated
    unchecked: AbstractSet[str]


class _Signature(NamedTuple):
    """All that determines the shards of leaves. Leaves with equal signatures have equal shards, with other data.

    A signature has no layouts and strides: a save refuses a leaf that is not strided, and strides change nothing.

    Attributes:
        names: The names of the leaves.
        is_dtensor: Whether each leaf is a DTensor.
        specs: The DTensorSpec of each DTensor: its mesh, placements, shape and dtype. torch replaces a spec, and never
            changes one. The save refuses a local tensor that contradicts its spec.
        shapes: The shape of each other leaf.
        dtypes: The dtype of each other leaf.
        options: The arguments of the description.
        ranks: This rank and the number of ranks: descriptions have both, and a job may make another group.
    """

    names: list[str]
    is_dtensor: list[bool]
    specs: list[Any]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    options: _Options
    ranks: tuple[int, int]

    def equals(self, other: _Signature) -> bool:
        """Return whether leaves of the other signature have equal shards."""
        return (
            self.names == other.names
            and self.is_dtensor == other.is_dtensor
            and all(map(is_, self.specs, other.specs))
            and self.shapes == other.shapes
            and self.dtypes == other.dtypes
            and self.options == other.options
            and self.ranks == other.ranks
        )


class LeafShards:
    """Describes the leaves of a state in each save; reuses the last save's shards while the signature stays equal.

    To describe 20,000 tensors takes several times as long as to copy them. Between two saves the shards have no data:
    shards with data would keep a model's memory after the model is gone.

    For saves only: a load by these shards would return plain tensors where a module has DTensors.
    """

    def __init__(self) -> None:
        self._signature: _Signature | None = None
        #: The reusable shard of each leaf by name; None for a leaf that is described in each save.
        self._shards: dict[str, ShardedTensor | None] = {}

    def describe(
        self, leaves: Mapping[str, Any], prefix: str, replicated: Replicated, unchecked: AbstractSet[str] = frozenset()
    ) -> dict[str, Any]:
        """Return the shards of leaves by name, each as :func:`describe_leaf` makes it, with factories built.

        A leaf that is several boxes has a list of shards. Shards share the leaves' memory: use them until
        :meth:`release`.
        """
        names, values, options = list(leaves), list(leaves.values()), _Options(prefix, replicated, unchecked)
        shards = self.reuse(names, values, *options)
        if shards is None:
            signature, local_tensors = _read_signature(names, values, options)
            self._signature, self._shards = None, {}  # describing may raise: then nothing is reusable
            shards = _describe_each(leaves, options)
            if signature is not None:
                self._keep(signature, local_tensors, shards)
        return shards

    def reuse(
        self,
        names: list[str],
        leaves: list[Any],
        prefix: str,
        replicated: Replicated,
        unchecked: AbstractSet[str] = frozenset(),
    ) -> dict[str, Any] | None:
        """Return the result of :meth:`describe`, with the shards of the last save; None if the signature has changed.

        The arguments are as for :meth:`describe`, with the names and the leaves in two lists.
        """
        if self._signature is None or names != self._signature.names:
            return None
        options = _Options(prefix, replicated, unchecked)
        signature, local_tensors = _read_signature(names, leaves, options)
        if signature is None or not signature.equals(self._signature):
            return None
        shards = self._shards.values()
        # describing may raise: the other shards have no data then
        described = _describe_each(
            {name: leaf for name, leaf, shard in zip(names, leaves, shards, strict=True) if shard is None}, options
        )
        for shard, local in zip(shards, local_tensors, strict=True):
            if shard is not None:
                shard.data = local.detach() if local.requires_grad else local  # to detach takes longer than to ask
        return self._shards | described

    def release(self) -> None:
        """Let go of the tensors; the shards that :meth:`describe` returned are of no use from then on."""
        for shard in self._shards.values():
            if shard is not None:
                shard.data = None

    def _keep(self, signature: _Signature, local_tensors: list[torch.Tensor], described: dict[str, Any]) -> None:
        """For the next save, keep the shard of each leaf whose whole local tensor is the data of that shard."""
        self._signature = signature
        self._shards = {
            name: shard if type(shard) is ShardedTensor and _holds_all(shard, local) else None
            for (name, shard), local in zip(described.items(), local_tensors, strict=True)
        }
        for shard in filter(None, self._shards.values()):
            shard.fix_fields()


def _read_signature(
    names: list[str], leaves: list[Any], options: _Options
) -> tuple[_Signature | None, list[torch.Tensor]]:
    """Return the signature of leaves and their local tensors; (None, []) if each save must describe the leaves."""
    kinds = list(map(type, leaves))
    if not set(kinds) <= _CLASSES:
        return None, []
    is_dtensor = [kind is DTensor for kind in kinds]
    dtensors = list(compress(leaves, is_dtensor))
    dtensor_locals = read_local_tensors(dtensors)
    if not set(map(type, dtensor_locals)) <= set(ORDINARY):  # describing waits for an AsyncCollectiveTensor
        return None, []
    plain = list(compress(leaves, map(not_, is_dtensor))) if dtensors else leaves
    try:
        shapes = list(map(torch.Tensor.size, plain))
    except RuntimeError:  # a nested tensor has no shape
        return None, []
    dtypes = list(map(attrgetter("dtype"), plain))
    signature = _Signature(names, is_dtensor, read_specs(dtensors), shapes, dtypes, options, rank_and_size())
    if not dtensors:
        return signature, leaves
    locals_in_order = iter(dtensor_locals)
    return signature, [next(locals_in_order) if flag else leaf for flag, leaf in zip(is_dtensor, leaves, strict=True)]


def _holds_all(shard: ShardedTensor, local: torch.Tensor) -> bool:
    """Return whether the data of a shard is the whole local tensor, in its shape."""
    return shard.data is not None and shard.data.shape == local.shape and shard.flattened_range is None


def _describe_each(leaves: Mapping[str, Any], options: _Options) -> dict[str, Any]:
    """Describe leaves by name with :func:`describe_leaf`, and build factories."""
    cache = LayoutCache()
    described = {}
    for name, leaf in leaves.items():
        replicated = "unchecked" if name in options.unchecked else options.replicated
        shard = describe_leaf(leaf, f"{options.prefix}{name}", replicated, cache=cache, detached=True)
        if isinstance(shard, ShardedTensorFactory):
            shards = shard.build()
            shard = shards[0] if isinstance(shards, list) and len(shards) == 1 else shards
        described[name] = shard
    return described
