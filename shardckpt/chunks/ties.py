"""Find tied tensors: keys whose shards are the same memory on every rank, which need to be stored once."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch

from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.tensors.memory import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from collections.abc import Set as AbstractSet

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import ShardedBase

#: The class of a key without a shard on a rank.
_ABSENT = -1


class TieFinder:
    """Finds a rank's tied tensors, save after save: the next tensors nearly always have the addresses of the last."""

    def __init__(self) -> None:
        #: The addresses of the last save without ties: where they are the same again, there are none again.
        self._different: list[int] = []

    def find(self, shards: Sequence[ShardedBase]) -> list[tuple[str, ...]]:
        """Return groups of two or more keys, sorted, whose shards have the same boxes and the same memory.

        The shards are all of the rank's, copies of replicas among them.
        """
        kinds, tensors = set(map(type, shards)), cast("Sequence[Any]", shards)
        if kinds != {ShardedTensor}:
            tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        addresses = _list_addresses([shard.data for shard in tensors])
        if addresses == self._different:
            return []
        known = list(filter(None, addresses))  # 0: a tensor without an address is tied to none
        if len(set(known)) == len(known):
            self._different = addresses
            return []
        counts = Counter(known)
        shared = {shard.key for shard, address in zip(tensors, addresses, strict=True) if counts[address] > 1}
        return [tuple(keys) for keys in _group(_sign(shards, shared)) if len(keys) > 1]


def agree_on_aliases(ties: list[tuple[str, ...]], shards: Sequence[ShardedBase], comm: Comm) -> dict[str, str]:
    """Collective: return for each tied key that need not be stored the one that is, the same on every rank.

    Keys are tied if each rank that has a shard of one of them has the same boxes of the others, in the same memory. The
    first of a group in the order of the alphabet is stored.
    """
    if comm.all_alike(repr(ties).encode()):  # as with FSDP: no rank needs to receive what the others have
        all_ties = [ties]
        if not ties:
            return {}
    else:
        all_ties = comm.all_gather(ties)
    candidates = sorted({key for theirs in all_ties for keys in theirs for key in keys})
    with comm.local_phase("comparing tied tensors"):
        signed = _sign(shards, frozenset(candidates))
        first: dict[Hashable, int] = {}
        mine = [
            first.setdefault(signed[key], number) if key in signed else _ABSENT for number, key in enumerate(candidates)
        ]
    # a key's class on every rank: two keys are tied if no rank tells them apart
    is_same = comm.all_alike(array("q", mine).tobytes())
    classes = zip(*([mine] if is_same else comm.all_gather(mine)), strict=True)
    groups = _group(dict(zip(candidates, classes, strict=True)))
    return {alias: key for key, *aliases in groups for alias in aliases}


def _group(values: dict[str, Any]) -> list[list[str]]:
    """Return the keys with equal values, in order."""
    groups: dict[Any, list[str]] = {}
    for key in sorted(values):
        groups.setdefault(values[key], []).append(key)
    return list(groups.values())


def _sign(shards: Sequence[ShardedBase], keys: AbstractSet[str]) -> dict[str, Hashable]:
    """Return for each of some keys all boxes that the rank has of it, and the memory of each."""
    found: dict[str, list[Hashable]] = {}
    for shard in shards:
        if isinstance(shard, ShardedTensor) and shard.key in keys:
            found.setdefault(shard.key, []).append((_describe(shard), _memory(shard)))
    return {key: frozenset(boxes) for key, boxes in found.items()}


def _describe(shard: ShardedTensor) -> Hashable:
    part = shard.flattened_range
    return (
        tuple(shard.global_shape),
        tuple(shard.global_offset),
        tuple(shard.local_shape),
        shard.prepend_axis_num,
        shard.block_scales,
        None if part is None else (part.start, part.stop),
    )


def _memory(shard: ShardedTensor) -> Hashable:
    """Return what tensors have in common that are the same view of the same memory; the key, if none can have it."""
    data = shard.data
    if data is None or type(data) not in ORDINARY or data.is_quantized:  # others hold values elsewhere, too
        return shard.key
    if not data.numel():
        return data.dtype, tuple(data.shape)
    address = _address(data)
    if not address:
        return shard.key
    return str(data.device), address, data.dtype, tuple(data.shape), data.stride(), data.is_conj(), data.is_neg()


def _list_addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return :func:`_address` of each tensor: every save asks, so all are asked in C where none is special."""
    if set(map(type, tensors)) <= set(ORDINARY):
        with suppress(RuntimeError):
            return list(map(torch.Tensor.data_ptr, cast("Sequence[torch.Tensor]", tensors)))
    return list(map(_address, tensors))


def _address(data: torch.Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 if it has none."""
    try:
        return data.data_ptr() if data is not None and type(data) in ORDINARY else 0
    except RuntimeError:  # sparse tensors, and those of functorch
        return 0
