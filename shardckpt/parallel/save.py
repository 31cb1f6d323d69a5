"""Fully parallel saves: copies of a shard are work to share, so each is written by the least loaded of its holders."""

from __future__ import annotations

import copy
import math
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardckpt.distributed import Comm
from shardckpt.engine import PlanCache
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import OBJECT_BYTES, deal, holders_by_shard
from shardckpt.state_dict import build_copy
from shardckpt.strategy import AsyncSaveStrategy, find_plan_cache_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping import CommonStateDict, ReplicaId, ShardedBase
    from shardckpt.strategy import PlanContext, PreparedSave, SaveContext, SaveStrategy


class _Copy(NamedTuple):
    """A rank's copy of a shard: which shard, its bytes, and whether it is the main one."""

    shard: tuple[Any, ...]
    nbytes: int
    main: bool


class _ParallelPlan(NamedTuple):
    """The replica ids of this rank's shards as they were dealt out, and the wrapped strategy's plan for them."""

    replica_ids: list[ReplicaId]
    plan: Any


class FullyParallelSaveStrategyWrapper(AsyncSaveStrategy):
    """Saves through another strategy, with the shards that a group of ranks replicates dealt to its members by bytes.

    What is written is the same as without it, in files of about equal size. The caller's replica ids stay as they are.

    Args:
        strategy: Writes the checkpoint.
        group: The ranks that hold copies of each other's shards (data parallel); by default all that save.
        do_cache_distribution: Keep the deal for the next save with this instance; it is used as long as no rank of the
            group has any other shards, which is checked each time, and spares the gathering of what all have.
            (Megatron's ``pg_cache_path``, a deal from a file that nothing checks, is not taken.)
        backend: Megatron's argument: the strategy's own, or an error.
        version: Megatron's argument: the strategy's own, or an error.
        validate_access_integrity: Accepted for Megatron's callers: the save itself checks that each shard has one
            main replica, and the deal keeps that.
        parallelization_group: The name of ``group`` in Megatron until 0.16.
    """

    caches_plan = True

    def __init__(
        self,
        strategy: SaveStrategy,
        group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        backend: str | None = None,
        version: int | None = None,
        validate_access_integrity: bool = True,  # noqa: ARG002 - see the class
        *,
        parallelization_group: ProcessGroup | None = None,
    ) -> None:
        asked = (backend or strategy.backend, strategy.version if version is None else version)
        if asked != (strategy.backend, strategy.version):
            raise CheckpointingException(
                f"backend and version {asked} are not those of the wrapped strategy, "
                f"{(strategy.backend, strategy.version)}: leave them out"
            )
        self._strategy = strategy
        self._group = parallelization_group if group is None else group
        self._cache: PlanCache[set[tuple[Any, ...]]] = PlanCache(int(do_cache_distribution))
        self.backend = strategy.backend  # type: ignore[misc]
        self.version = strategy.version  # type: ignore[misc]
        self.reader = strategy.reader  # type: ignore[misc]
        self.writes = strategy.writes  # type: ignore[misc]

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Deal the shards out, and save."""
        self._strategy.save(self._dealt(shards, context), common, context)

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Deal the shards out, and plan a save behind the training, if the strategy can."""
        if not isinstance(self._strategy, AsyncSaveStrategy):
            raise CheckpointingException(
                f"async_sharded_save=True: {type(self._strategy).__qualname__} saves in the foreground only; pass False"
            )
        dealt = self._dealt(shards, context)
        prepared = self._strategy.prepare(dealt, common, context)
        if prepared.plan is None:
            return prepared
        return replace(prepared, plan=_ParallelPlan([shard.replica_id for shard in dealt], prepared.plan))

    def replan(
        self, plan: _ParallelPlan, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Deal the shards out as before, and let the strategy plan by its own plan."""
        dealt = list(map(build_copy, shards))
        for shard, replica_id in zip(dealt, plan.replica_ids, strict=True):
            shard.replica_id = replica_id
        strategy = cast("AsyncSaveStrategy", self._strategy)  # others have no plans
        return strategy.replan(plan.plan, dealt, common, context)

    @property
    def plan_cache_key(self) -> Hashable | None:
        """The group and the strategy's own key; None where the strategy has none."""
        strategy_key = find_plan_cache_key(self._strategy)
        if strategy_key is None:
            return None
        try:  # a cached plan must not keep a group from its end
            group = self._group and weakref.ref(self._group)
        except TypeError:  # it is what torch gives to those who are no members
            return None
        return type(self), group, strategy_key

    def _dealt(self, shards: Sequence[ShardedBase], context: PlanContext) -> list[ShardedBase]:
        """Copies of the shards with new replica ids, which say what this rank is to write."""
        with context.comm.phase("dealing out shards"):
            group = context.comm if self._group is None else Comm(self._group)
            with group.phase("dealing out shards"):
                dealt = share_out(shards, group, self._cache)
        return dealt


def share_out(
    shards: Sequence[ShardedBase], group: Comm, cache: PlanCache[set[tuple[Any, ...]]] | None = None
) -> list[ShardedBase]:
    """The shards with new replica ids: each is the main one on exactly one rank of the group that has its main replica.

    Args:
        shards: This rank's; copies are returned, these stay as they are.
        group: The ranks to share the work.
        cache: Has the last deal, to use if nothing has changed since.
    """
    with group.phase("listing shards"):
        copies = [_copy_of(shard) for shard in shards]
    cache = PlanCache(0) if cache is None else cache
    mine = set(cache.find_or_plan(copies, group, lambda: _parts(group.all_gather(copies))[group.rank]))
    return [_renumbered(shard, mine) for shard in shards]


def _parts(everyone: list[list[_Copy]]) -> list[set[tuple[Any, ...]]]:
    """What each rank of a group writes."""
    sizes = {c.shard: c.nbytes for copies in everyone for c in copies}
    here = {c.shard for copies in everyone for c in copies if c.main}
    everywhere = holders_by_shard([c.shard for c in copies] for copies in everyone)
    holders = {shard: ranks for shard, ranks in everywhere.items() if shard in here}
    parts: list[set[tuple[Any, ...]]] = [set() for _ in everyone]
    writers = deal(list(holders.values()), [sizes[shard] for shard in holders])
    for shard, rank in zip(holders, writers, strict=True):
        parts[rank].add(shard)
    return parts


def _copy_of(shard: ShardedBase) -> _Copy:
    main = is_main_replica(shard.replica_id)
    if isinstance(shard, ShardedTensor):
        return _Copy(_shard_id(shard), math.prod(shard.data_shape) * shard.dtype.itemsize, main)
    return _Copy(_shard_id(shard), OBJECT_BYTES, main)


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
