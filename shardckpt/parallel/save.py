"""Fully parallel saves: every shard is written by the least loaded of the ranks that hold a copy."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardckpt.distributed import Comm
from shardckpt.engine import PlanCache
from shardckpt.errors import CheckpointingException
from shardckpt.planning import assign_shards, describe_copy, shard_id
from shardckpt.state_dict import build_copy
from shardckpt.strategy import AsyncSaveStrategy, find_plan_cache_key

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping import CommonStateDict, ReplicaId, ShardedBase
    from shardckpt.strategy import PlanContext, PreparedSave, SaveContext, SaveStrategy


class _ParallelPlan(NamedTuple):
    """The replica ids of this rank's shards as they were assigned, and the wrapped strategy's plan for them."""

    replica_ids: list[ReplicaId]
    plan: Any


class FullyParallelSaveStrategyWrapper(AsyncSaveStrategy):
    """Saves through another strategy; each shard that ranks of a group replicate is assigned to one, balanced by bytes.

    What is written is the same as without it, in files of about equal size. The caller's replica ids stay as they are.

    Args:
        strategy: Writes the checkpoint.
        group: The ranks that hold copies of each other's shards (data parallel); by default all that save.
        do_cache_distribution: Keep the assignment for the next save with this instance; it is used as long as no rank
            of the group has any other shards, which is checked each time, and spares the gathering of what all have.
            (Megatron's ``pg_cache_path``, an assignment from a file that nothing checks, is not taken.)
        backend: Megatron's argument: the strategy's own, or an error.
        version: Megatron's argument: the strategy's own, or an error.
        validate_access_integrity: Accepted for Megatron's callers: the save itself checks that each shard has one
            main replica, and the assignment keeps that.
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
        self._cache: PlanCache[set[Hashable]] = PlanCache(int(do_cache_distribution))
        self.backend = strategy.backend  # type: ignore[misc]
        self.version = strategy.version  # type: ignore[misc]
        self.reader = strategy.reader  # type: ignore[misc]
        self.writes = strategy.writes  # type: ignore[misc]

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Collective: assign the shards, and save."""
        self._strategy.save(self._assign(shards, context), common, context)

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: assign the shards, and plan a save behind the training, if the strategy can."""
        if not isinstance(self._strategy, AsyncSaveStrategy):
            raise CheckpointingException(
                f"async_sharded_save=True: {type(self._strategy).__qualname__} saves in the foreground only; pass False"
            )
        assigned = self._assign(shards, context)
        prepared = self._strategy.prepare(assigned, common, context)
        if prepared.plan is None:
            return prepared
        return replace(prepared, plan=_ParallelPlan([shard.replica_id for shard in assigned], prepared.plan))

    def replan(
        self, plan: _ParallelPlan, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext
    ) -> PreparedSave | None:
        """Assign the shards as before, and let the strategy plan by its own plan."""
        assigned = list(map(build_copy, shards))
        for shard, replica_id in zip(assigned, plan.replica_ids, strict=True):
            shard.replica_id = replica_id
        strategy = cast("AsyncSaveStrategy", self._strategy)  # others have no plans
        return strategy.replan(plan.plan, assigned, common, context)

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

    def _assign(self, shards: Sequence[ShardedBase], context: PlanContext) -> list[ShardedBase]:
        with context.comm.collective_phase("assigning shards"):
            group = context.comm if self._group is None else Comm(self._group)
            with group.collective_phase("assigning shards"):
                assigned = assign_main_replicas(shards, group, self._cache)
        return assigned


def assign_main_replicas(
    shards: Sequence[ShardedBase], group: Comm, cache: PlanCache[set[Hashable]] | None = None
) -> list[ShardedBase]:
    """Collective: make each shard of which the group has a main replica the main one on exactly one of its ranks.

    Args:
        shards: This rank's; they stay as they are.
        group: The ranks to share the work.
        cache: Has the last assignment, to use if nothing has changed since.

    Returns:
        Copies of the shards, with replica id 0 where this rank is to write, else 1.
    """
    with group.collective_phase("listing shards"):
        copies = [describe_copy(shard) for shard in shards]

    def assign() -> set[Hashable]:
        assigned = assign_shards(group.all_gather(copies), main_only=True)
        return {shard for shard, assignment in assigned.items() if assignment.rank == group.rank}

    cache = PlanCache(0) if cache is None else cache
    mine = set(cache.find_or_plan(copies, group, assign))
    return [_renumber(shard, mine) for shard in shards]


def _renumber(shard: ShardedBase, mine: set[Hashable]) -> ShardedBase:
    """Copy a shard with a replica id that says whether this rank writes it; of two copies the second is not written."""
    renumbered = copy.copy(shard)
    key = shard_id(shard)
    renumbered.replica_id = 0 if key in mine else 1
    mine.discard(key)
    return renumbered


__all__ = ["FullyParallelSaveStrategyWrapper", "assign_main_replicas"]
