"""Fully parallel saves: copies of a shard are work to share, so each is written by the least loaded of its holders."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.comm import Comm
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning.balance import deal
from shardckpt.strategy import SaveStrategy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import SaveContext

#: Bytes that an object counts for: its size is not known before it is pickled.
_OBJECT_BYTES = 4096


class _Copy(NamedTuple):
    """A rank's copy of a shard: which shard, its bytes, and whether it is the main one."""

    shard: tuple[Any, ...]
    nbytes: int
    main: bool


class FullyParallelSaveStrategyWrapper(SaveStrategy):
    """Saves through another strategy, with the shards that a group of ranks replicates dealt to its members by bytes.

    What is written is the same as without it, in files of about equal size. The caller's replica ids stay as they are.

    Args:
        strategy: Writes the checkpoint.
        group: The ranks that hold copies of each other's shards (data parallel); by default all that save.
    """

    def __init__(self, strategy: SaveStrategy, group: ProcessGroup | None = None) -> None:
        self._strategy = strategy
        self._group = group
        self.backend = strategy.backend  # type: ignore[misc]
        self.version = strategy.version  # type: ignore[misc]
        self.reader = strategy.reader  # type: ignore[misc]

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Deal the shards out, and save."""
        group = context.comm if self._group is None else Comm(self._group)
        with context.comm.phase("dealing out shards"):
            dealt = share_out(shards, group)
        self._strategy.save(dealt, common, context)


def share_out(shards: Sequence[ShardedBase], group: Comm) -> list[ShardedBase]:
    """The shards with new replica ids: each is the main one on exactly one rank of the group that has its main replica.

    Args:
        shards: This rank's; copies are returned, these stay as they are.
        group: The ranks to share the work.
    """
    everyone = group.all_gather([_copy_of(shard) for shard in shards])
    holders: dict[tuple[Any, ...], set[int]] = {}
    sizes: dict[tuple[Any, ...], int] = {}
    here: set[tuple[Any, ...]] = set()
    for rank, copies in enumerate(everyone):
        for shard, nbytes, main in copies:
            holders.setdefault(shard, set()).add(rank)
            sizes[shard] = nbytes
            if main:
                here.add(shard)
    ordered = sorted(here, key=repr)
    writers = deal([tuple(sorted(holders[shard])) for shard in ordered], [sizes[shard] for shard in ordered])
    mine = {shard for shard, rank in zip(ordered, writers, strict=True) if rank == group.rank}
    return [_renumbered(shard, mine) for shard in shards]


def _copy_of(shard: ShardedBase) -> _Copy:
    main = is_main_replica(shard.replica_id)
    if isinstance(shard, ShardedTensor):
        return _Copy(_shard_id(shard), math.prod(shard.data_shape) * shard.dtype.itemsize, main)
    return _Copy(_shard_id(shard), _OBJECT_BYTES, main)


def _shard_id(shard: ShardedBase) -> tuple[Any, ...]:
    """What two copies of the same shard have in common."""
    if isinstance(shard, ShardedTensor):
        part = shard.flattened_range
        flat = None if part is None else (part.start, part.stop)
        return ("tensor", shard.key, tuple(shard.global_offset), tuple(shard.local_shape), flat)
    if isinstance(shard, ShardedObject):
        return ("object", shard.unique_key)
    return ("other", shard.key)


def _renumbered(shard: ShardedBase, mine: set[tuple[Any, ...]]) -> ShardedBase:
    """A copy of the shard whose replica id says whether this rank writes it; a rank's second copy is not written."""
    renumbered = copy.copy(shard)
    key = _shard_id(shard)
    renumbered.replica_id = 0 if key in mine else 1
    mine.discard(key)
    return renumbered


__all__ = ["FullyParallelSaveStrategyWrapper", "share_out"]
