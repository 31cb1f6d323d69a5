"""Describe leaves that a job saves again and again: anew only if one has another shape, dtype or sharding."""

from __future__ import annotations

from itertools import compress
from operator import attrgetter, is_, not_
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

#: Classes whose shards follow from a :class:`_Signature`; with a leaf of another, all are described in each save.
_CLASSES = frozenset((*ORDINARY, DTensor))


class _Signature(NamedTuple):
    """What the shards of leaves follow from. Leaves with an equal signature have the same shards, with other data.

    Layouts and strides are not in it: a save refuses a leaf that is not strided, and stores any strides alike.

    Attributes:
        names: The names of the leaves.
        is_dtensor: Whether each leaf is a DTensor.
        specs: The DTensorSpec of each DTensor: its mesh, placements, shape and dtype. torch replaces this object, and
            does not change it. A local tensor whose shape or dtype does not follow from it is refused by the save.
        shapes: The shape of each other leaf.
        dtypes: The dtype of each other leaf.
        options: The arguments of the description, this rank and the number of ranks.
    """

    names: list[str]
    is_dtensor: list[bool]
    specs: list[Any]
    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    options: tuple[Any, ...]

    def equals(self, other: _Signature) -> bool:
        """Return whether leaves of the other signature have the same shards."""
        return (
            self.names == other.names  # the same list, where the caller has compared them
            and self.is_dtensor == other.is_dtensor
            and all(map(is_, self.specs, other.specs))
            and self.shapes == other.shapes
            and self.dtypes == other.dtypes
            and self.options == other.options
        )


class LeafShards:
    """Describes the leaves of a state in each save; reuses the last save's shards if the leaves have not changed.

    To describe 20,000 tensors takes several times as long as to copy them. Between two saves the shards have no data:
    it would stay in memory when the model is gone.

    For saves only: a load would return plain tensors where a module has DTensors.
    """

    def __init__(self) -> None:
        self._signature: _Signature | None = None
        #: The shard of each leaf by name; None for a leaf that is described in each save.
        self._shards: dict[str, ShardedTensor | None] = {}

    def describe(
        self, leaves: Mapping[str, Any], prefix: str, replicated: Replicated, unchecked: AbstractSet[str] = frozenset()
    ) -> dict[str, Any]:
        """Return the shards of leaves by name, each as :func:`describe_leaf` makes it, with factories built.

        A leaf that is several boxes has a list of shards. They share the leaves' memory: use them until
        :meth:`release`.
        """
        names, values, options = list(leaves), list(leaves.values()), (prefix, replicated, unchecked)
        shards = self.reuse(names, values, *options)
        if shards is None:
            signature, local_tensors = _read_signature(names, values, options)
            self._signature, self._shards = None, {}  # kept only if no leaf is refused
            shards = _describe_each(leaves, *options)
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
        """Return what :meth:`describe` does, with the shards of the last save; None if leaves have changed since.

        The arguments are those of that method, with the names and the leaves in two lists.
        """
        if self._signature is None or names != self._signature.names:
            return None
        options = (prefix, replicated, unchecked)
        signature, local_tensors = _read_signature(names, leaves, options)
        if signature is None or not signature.equals(self._signature):
            return None
        described_anew: dict[str, Any] = {}
        for name, leaf, shard, local in zip(names, leaves, self._shards.values(), local_tensors, strict=True):
            if shard is None:
                described_anew[name] = leaf
            else:
                shard.data = local.detach() if local.requires_grad else local  # to detach takes longer than to ask
        return self._shards | _describe_each(described_anew, *options)

    def release(self) -> None:
        """Let go of the tensors; what :meth:`describe` has returned must not be used any more."""
        for shard in self._shards.values():
            if shard is not None:
                shard.data = None

    def _keep(self, signature: _Signature, local_tensors: list[torch.Tensor], described: dict[str, Any]) -> None:
        """Keep the shards for the next save, except of leaves whose local tensor is not the data of one shard."""
        self._signature = signature
        self._shards = {
            name: shard if type(shard) is ShardedTensor and _holds_all(shard, local) else None
            for (name, shard), local in zip(described.items(), local_tensors, strict=True)
        }
        for shard in filter(None, self._shards.values()):
            shard.fix_fields()


def _read_signature(
    names: list[str], leaves: list[Any], options: tuple[Any, ...]
) -> tuple[_Signature | None, list[torch.Tensor]]:
    """Return the signature of leaves and their local tensors; None if the shards of a leaf do not follow from one."""
    kinds = list(map(type, leaves))
    if not set(kinds) <= _CLASSES:
        return None, []
    is_dtensor = [kind is DTensor for kind in kinds]
    dtensors = list(compress(leaves, is_dtensor))
    of_dtensors = read_local_tensors(dtensors)
    if not set(map(type, of_dtensors)) <= set(ORDINARY):  # an AsyncCollectiveTensor is to be waited for
        return None, []
    plain = list(compress(leaves, map(not_, is_dtensor))) if dtensors else leaves
    try:
        shapes = list(map(torch.Tensor.size, plain))
    except RuntimeError:  # nested tensors have none
        return None, []
    dtypes = list(map(attrgetter("dtype"), plain))
    options = (*options, *_find_ranks())
    signature = _Signature(names, is_dtensor, read_specs(dtensors), shapes, dtypes, options)
    if not dtensors:
        return signature, leaves
    next_local = iter(of_dtensors).__next__
    return signature, [next_local() if found else leaf for leaf, found in zip(leaves, is_dtensor, strict=True)]


def _find_ranks() -> tuple[int, int]:
    """Return this rank and the number of ranks: descriptions have them, and a job may make another group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _holds_all(shard: ShardedTensor, local: torch.Tensor) -> bool:
    """Return whether the data of a shard is the whole local tensor, in its shape."""
    return shard.data is not None and shard.data.shape == local.shape and shard.flattened_range is None


def _describe_each(
    leaves: Mapping[str, Any], prefix: str, replicated: Replicated, unchecked: AbstractSet[str]
) -> dict[str, Any]:
    alike = AlikeTensors()
    described = {}
    for name, leaf in leaves.items():
        replication = "unchecked" if name in unchecked else replicated
        shard = describe_leaf(leaf, f"{prefix}{name}", replication, alike=alike, detached=True)
        if isinstance(shard, ShardedTensorFactory):
            shards = shard.build()
            shard = shards[0] if isinstance(shards, list) and len(shards) == 1 else shards
        described[name] = shard
    return described
