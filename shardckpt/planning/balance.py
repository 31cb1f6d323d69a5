"""Dealing shards to the ranks that hold copies of them, so that all have about the same bytes to move."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

#: Bytes that an object counts for: its size is not known before it is pickled or read.
OBJECT_BYTES = 4096

_K = TypeVar("_K", bound="Hashable")


def holders_by_shard(everyone: Iterable[Iterable[_K]]) -> dict[_K, tuple[int, ...]]:
    """The ranks that list each shard, ascending; shards stand in the order in which they are first listed.

    Args:
        everyone: The shards of every rank, in rank order; a rank may list one twice.
    """
    holders: dict[_K, list[int]] = {}
    for rank, shards in enumerate(everyone):
        for shard in shards:
            ranks = holders.setdefault(shard, [])
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    return {shard: tuple(ranks) for shard, ranks in holders.items()}


def deal(holders: Sequence[tuple[int, ...]], sizes: Sequence[int], late: Collection[int] = ()) -> list[int]:
    """Choose one of its holders for every shard: the least loaded, the scarcest and largest shards first.

    The result depends on the arguments alone, so ranks that know them agree without talking. Ranks with the same set of
    holders share a heap: S shards on N ranks take O(S log N) steps.

    Args:
        holders: The ranks that hold a copy of each shard, ascending; none is empty.
        sizes: Bytes of each shard.
        late: Numbers of shards that are dealt when all others are.

    Returns:
        The chosen rank of each shard.
    """
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    heap_of = [heaps.get(ranks) or heaps.setdefault(ranks, [(0, rank) for rank in ranks]) for ranks in holders]
    loads = {rank: 0 for ranks in heaps for rank in ranks}
    chosen = [0] * len(holders)
    for number in sorted(range(len(holders)), key=lambda n: (n in late, len(holders[n]), -sizes[n], n)):
        heap = heap_of[number]
        while heap[0][0] != loads[heap[0][1]]:  # another set of holders has loaded that rank meanwhile
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        chosen[number] = rank
        loads[rank] += sizes[number]
        heapq.heapreplace(heap, (loads[rank], rank))
    return chosen


__all__ = ["OBJECT_BYTES", "deal", "holders_by_shard"]
