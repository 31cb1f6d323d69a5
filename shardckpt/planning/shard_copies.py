"""Copies of a shard on several ranks: their common id, the ranks that hold them, and the rank that does the work."""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from shardckpt.mapping.base import is_main_replica
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterable, Sequence

    from shardckpt.mapping.base import ShardedBase
    from shardckpt.planning.boxes import Ints

#: Bytes that an object counts as: its size is not known before it is pickled or read.
OBJECT_BYTES = 4096

#: Kind, key, global offset, extent, and start and stop of the flattened range if there is one. A plain tuple: it is
#: cheap to make, to hash and to send.
ShardId: TypeAlias = "tuple[str, str, Ints, Ints, tuple[int, int] | None]"

_K = TypeVar("_K", bound="Hashable")


class ShardCopy(NamedTuple):
    """A rank's copy of a shard, as other ranks need to know it.

    ``shard`` is the id of the shard, which can be hashed; ``nbytes`` are its bytes, :data:`OBJECT_BYTES` for an object.
    ``is_main``: this copy is the main replica.
    """

    shard: Any
    nbytes: int
    is_main: bool


class Assignment(NamedTuple):
    """The rank that reads or writes a shard, and all ranks that hold a copy of it, ascending."""

    rank: int
    holders: tuple[int, ...]


def shard_id(shard: ShardedBase) -> ShardId:
    """Return the id of a shard: all its copies have the same, and no other shard has it.

    The extent is a part of it, because an empty shard may have the offset of another shard.
    """
    if isinstance(shard, ShardedTensor):
        part = shard.flattened_range
        flat = None if part is None else (part.start, part.stop)
        return "tensor", shard.key, tuple(shard.global_offset), tuple(shard.local_shape), flat
    if isinstance(shard, ShardedObject):
        return "object", shard.key, tuple(shard.global_offset), tuple(shard.global_shape), None
    return "other", shard.key, (), (), None


def shard_nbytes(shard: ShardedBase) -> int:
    """Return the bytes of a shard's tensor, or :data:`OBJECT_BYTES` for anything else."""
    return math.prod(shard.data_shape) * shard.dtype.itemsize if isinstance(shard, ShardedTensor) else OBJECT_BYTES


def describe_copy(shard: ShardedBase) -> ShardCopy:
    """Return the description of this rank's copy of a shard for other ranks."""
    return ShardCopy(shard_id(shard), shard_nbytes(shard), is_main_replica(shard.replica_id))


def find_holders(items_by_rank: Iterable[Iterable[_K]]) -> dict[_K, tuple[int, ...]]:
    """Return the ranks that list each item, ascending; items stand in the order in which they are first listed.

    The items, shard ids or others that can be hashed, are every rank's, in rank order; a rank may list one twice.
    """
    holders: dict[_K, list[int]] = {}
    for rank, items in enumerate(items_by_rank):
        for item in items:
            ranks = holders.setdefault(item, [])
            if not ranks or ranks[-1] != rank:
                ranks.append(rank)
    return {item: tuple(ranks) for item, ranks in holders.items()}


def assign_shards(copies_by_rank: Sequence[Sequence[ShardCopy]], *, main_only: bool) -> dict[Any, Assignment]:
    """Assign every shard to one of the ranks that hold a copy of it, so that all ranks move about the same bytes.

    The result, by the shard's id, is the same on every rank that has the same arguments: the copies of every rank, in
    rank order. With ``main_only`` shards without a main replica on these ranks are left out. Otherwise these are
    assigned last, when the loads of all others are known.
    """
    nbytes = {copy.shard: copy.nbytes for copies in copies_by_rank for copy in copies}
    main = {copy.shard for copies in copies_by_rank for copy in copies if copy.is_main}
    holders = find_holders([copy.shard for copy in copies] for copies in copies_by_rank)
    if main_only:
        holders = {shard: ranks for shard, ranks in holders.items() if shard in main}
    late = {number for number, shard in enumerate(holders) if shard not in main}
    chosen = assign_holders(list(holders.values()), [nbytes[shard] for shard in holders], late)
    return {shard: Assignment(rank, ranks) for (shard, ranks), rank in zip(holders.items(), chosen, strict=True)}


def assign_holders(holders: Sequence[tuple[int, ...]], sizes: Sequence[int], late: Collection[int] = ()) -> list[int]:
    """Choose one of its holders for every item: the least loaded, the scarcest and largest items first.

    Holders are ranks (or files), ascending; no item is without. Items of ``late`` are assigned after all others. The
    result depends on the arguments alone, so ranks with the same arguments get the same result without communication.
    Items with the same set of holders share a heap: S items on N ranks take O(S log N) steps.
    """
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    heap_of = [heaps.get(ranks) or heaps.setdefault(ranks, [(0, rank) for rank in ranks]) for ranks in holders]
    loads = {rank: 0 for ranks in heaps for rank in ranks}
    chosen = [0] * len(holders)
    # Scarce items first: the items that only one rank has are a load that the others can balance. The number breaks
    # ties, so that all ranks make the same choice.
    for number in sorted(range(len(holders)), key=lambda n: (n in late, len(holders[n]), -sizes[n], n)):
        heap = heap_of[number]
        while heap[0][0] != loads[heap[0][1]]:  # out of date: an item of another heap went to that rank
            heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        chosen[number] = rank
        loads[rank] += sizes[number]
        heapq.heapreplace(heap, (loads[rank], rank))
    return chosen
