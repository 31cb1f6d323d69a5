"""Find tied tensors: keys whose shards are the same memory on every rank, which need to be stored once."""

from __future__ import annotations

from array import array
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, cast

import torch

from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.tensors.memory import ORDINARY

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import ShardedBase

#: The id of a key without a shard on this rank.
_ABSENT = -1


class TieFinder:
    """Finds a rank's tied tensors, save after save: the next tensors nearly always have the addresses of the last."""

    def __init__(self) -> None:
        #: The addresses of the last save without ties: no two were equal, so the same addresses have no ties either.
        self._untied_addresses: list[int] = []

    def find(self, shards: Sequence[ShardedBase]) -> list[tuple[str, ...]]:
        """Return groups of two or more keys, sorted, whose shards have the same boxes and the same memory.

        ``shards`` are all that the rank has, also those that another replica stores.
        """
        tensors = [shard for shard in shards if isinstance(shard, ShardedTensor)]
        addresses = _list_addresses([shard.data for shard in tensors])
        if addresses == self._untied_addresses:
            return []
        counts = Counter(filter(None, addresses))  # 0: a tensor without an address is tied to none
        shared = {shard.key for shard, address in zip(tensors, addresses, strict=True) if counts[address] > 1}
        if not shared:
            self._untied_addresses = addresses
            return []
        return [tuple(keys) for keys in _group_equal(_list_views(tensors, shared)) if len(keys) > 1]


def agree_on_aliases(ties: list[tuple[str, ...]], shards: Sequence[ShardedBase], comm: Comm) -> dict[str, str]:
    """Collective: return, for each tied key that is not stored, the key that is; the same on every rank.

    ``ties`` are the rank's own groups, as :meth:`TieFinder.find` returns them. Keys are tied if each rank that has a
    shard of one of them has the same boxes of the others, in the same memory. The first of a group in alphabetical
    order is stored.
    """
    if comm.all_equal(repr(ties).encode()):  # as with FSDP, where every rank has a shard of every tensor
        if not ties:
            return {}
        all_ties = [ties]
    else:
        all_ties = comm.all_gather(ties)
    candidates = sorted({key for rank_ties in all_ties for keys in rank_ties for key in keys})
    with comm.local_phase("comparing tied tensors"):
        views = _list_views(shards, frozenset(candidates))
        # addresses mean nothing on other ranks: compared are small ids, equal where this rank has the same views
        id_of_views: dict[Hashable, int] = {}
        ids = [id_of_views.setdefault(views[key], n) if key in views else _ABSENT for n, key in enumerate(candidates)]
    ids_of_ranks = [ids] if comm.all_equal(array("q", ids).tobytes()) else comm.all_gather(ids)
    # two keys are tied if their ids are equal on every rank
    groups = _group_equal(dict(zip(candidates, zip(*ids_of_ranks, strict=True), strict=True)))
    return {alias: stored for stored, *aliases in groups for alias in aliases}


def _group_equal(values: Mapping[str, Hashable]) -> list[list[str]]:
    """Return lists of the keys that have equal values, in alphabetical order."""
    groups: dict[Hashable, list[str]] = {}
    for key in sorted(values):
        groups.setdefault(values[key], []).append(key)
    return list(groups.values())


def _list_views(shards: Iterable[ShardedBase], keys: AbstractSet[str]) -> dict[str, Hashable]:
    """Return the views of each of the keys: the boxes of its shards, each with an identity of its memory."""
    views: dict[str, list[Hashable]] = {}
    for shard in shards:
        if isinstance(shard, ShardedTensor) and shard.key in keys:
            flat = shard.flattened_range
            box = (
                tuple(shard.global_shape),
                tuple(shard.global_offset),
                tuple(shard.local_shape),
                shard.prepend_axis_num,
                shard.block_scales,
                None if flat is None else (flat.start, flat.stop),
            )
            views.setdefault(shard.key, []).append((box, _identify_memory(shard)))
    return {key: frozenset(boxes) for key, boxes in views.items()}


def _identify_memory(shard: ShardedTensor) -> Hashable:
    """Return a value that two shards share if they are the same view of the same memory; the key if none can share it.

    Empty tensors have no address. Those of one dtype and shape share it: an uneven sharding gives some ranks empty
    shards of tied tensors, and these must not untie what the other ranks have.
    """
    data = shard.data
    if data is None or type(data) not in ORDINARY or data.is_quantized:  # not all their values are at the address
        return shard.key
    if not data.numel():
        return data.dtype, tuple(data.shape)
    address = _find_address(data)
    if not address:
        return shard.key
    return str(data.device), address, data.dtype, tuple(data.shape), data.stride(), data.is_conj(), data.is_neg()


def _list_addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    """Return the address of each tensor, or 0. Every save asks: a loop in C, where all tensors are ordinary."""
    if set(map(type, tensors)) <= set(ORDINARY):
        with suppress(RuntimeError):
            return list(map(torch.Tensor.data_ptr, cast("Sequence[torch.Tensor]", tensors)))
    return list(map(_find_address, tensors))


def _find_address(data: torch.Tensor | None) -> int:
    """Return the address of a tensor's first element; 0 if it has none."""
    try:
        return data.data_ptr() if data is not None and type(data) in ORDINARY else 0
    except RuntimeError:  # sparse tensors, and those of functorch
        return 0
