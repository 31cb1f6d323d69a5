"""Dealing shards to the ranks that hold copies of them, so that all have about the same bytes to move."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def deal(holders: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> list[int]:
    """Choose one of its holders for every shard: the least loaded, the scarcest and largest shards first.

    The result depends on the arguments alone, so ranks that know them agree without talking. Ranks with the same set of
    holders share a heap: O(S log N) for S shards on N ranks.

    Args:
        holders: The ranks that hold a copy of each shard, ascending; none is empty.
        sizes: Bytes of each shard.

    Returns:
        The chosen rank of each shard.
    """
    loads: dict[int, int] = {rank: 0 for ranks in set(holders) for rank in ranks}
    heaps = {ranks: [(0, rank) for rank in ranks] for ranks in set(holders)}
    chosen = [0] * len(holders)
    for number in sorted(range(len(holders)), key=lambda n: (len(holders[n]), -sizes[n], n)):
        heap = heaps[holders[number]]
        while heap[0][0] != loads[heap[0][1]]:  # another set of holders has loaded that rank meanwhile
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        chosen[number] = rank
        loads[rank] += sizes[number]
        heapq.heapreplace(heap, (loads[rank], rank))
    return chosen


__all__ = ["deal"]
