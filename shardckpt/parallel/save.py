"""Fully parallel saves: of the ranks that hold a copy of a shard, the least loaded one writes it."""

from __future__ import annotations

import copy
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from shardckpt.distributed.comm import Comm
from shardckpt.engine.plan_cache import PlanCache
from shardckpt.errors import CheckpointingException, PluginError, show_given
from shardckpt.planning.shard_copies import assign_shards, describe_copy, shard_id
from shardckpt.state_dict import build_copy
from shardckpt.strategy import AsyncSaveStrategy, SaveStrategy, find_plan_cache_key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping.base import CommonStateDict, ReplicaId, ShardedBase
    from shardckpt.planning.shard_copies import Assignment
    from shardckpt.strategy import PlanContext, PreparedSave, SaveContext


class _ParallelPlan(NamedTuple):
    """The replica ids that this rank's shards were assigned, in order, and the wrapped strategy's plan for them."""

    replica_ids: list[ReplicaId]
    plan: Any


class FullyParallelSaveStrategyWrapper(AsyncSaveStrategy):
    """Saves through another strategy; of the ranks that replicate a shard one writes it, balanced by bytes.

    The written shards are the same as without this wrapper, in files of about equal size. The caller's replica ids do
    not change.

    Example:
        Ranks of a data-parallel group write a part each::

            strategy = FullyParallelSaveStrategyWrapper(save_strategy, data_parallel_group)
            save(sharded_state_dict, path, strategy)

    Args:
        strategy: Writes the checkpoint.
        group: The ranks that hold copies of each other's shards (data parallel); by default all that save.
        do_cache_distribution: Keep the assignment for the next save with this instance. It is reused as long as all
            ranks of the group have the same shards as before, which each save checks; a reuse saves one all-gather.
            (Megatron's ``pg_cache_path``, an assignment from a file that nothing checks, is not supported.)
        backend: Megatron's argument; None, or the strategy's own.
        version: Megatron's argument; None, or the strategy's own.
        validate_access_integrity: Accepted for Megatron's callers: the save itself checks that each shard has one
            main replica, and the assignment keeps that.
        parallelization_group: The name of ``group`` in Megatron until 0.16.

    Raises:
        CheckpointingException: ``backend`` or ``version`` is not the strategy's.
        PluginError: ``strategy`` is no instance of a save strategy.
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
        if not isinstance(strategy, SaveStrategy):
            raise PluginError(f"{type(self).__name__} wraps an instance of a save strategy, not {show_given(strategy)}")
        asked = (backend or strategy.backend, strategy.version if version is None else version)
        if asked != (strategy.backend, strategy.version):
            raise CheckpointingException(
                f"backend and version {asked} are not those of the wrapped strategy, "
                f"{(strategy.backend, strategy.version)}: leave them out"
            )
        self._strategy = strategy
        self._group = parallelization_group if group is None else group
        #: Whether an assignment is kept for the next save.
        self.keeps_distribution = do_cache_distribution
        #: For strategies whose plans the engine does not cache; see :class:`shardckpt.engine.PlanCache`.
        self._cache: PlanCache[set[Hashable]] = PlanCache(int(do_cache_distribution))
        self.backend = strategy.backend  # type: ignore[misc]
        self.version = strategy.version  # type: ignore[misc]
        self.reader = strategy.reader  # type: ignore[misc]
        self.writes = strategy.writes  # type: ignore[misc]
        self.supports_objects = strategy.supports_objects  # type: ignore[misc]
        self.stores_plain_objects = strategy.stores_plain_objects  # type: ignore[misc]
        self.computes_fingerprints = strategy.computes_fingerprints  # type: ignore[misc]
        self.stores_all_bytes = strategy.stores_all_bytes  # type: ignore[misc]

    @property
    def agreed_options(self) -> Mapping[str, object]:
        """The wrapped strategy's options, and whether an assignment is kept: the ranks look for it together."""
        return {**self._strategy.agreed_options, "do_cache_distribution": bool(self.keeps_distribution)}

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Collective: assign the shards to ranks, and save through the wrapped strategy."""
        self._strategy.save(self._assign(shards, context), common, context)

    def prepare(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: PlanContext) -> PreparedSave:
        """Collective: assign the shards to ranks, and let the wrapped strategy plan an asynchronous save.

        Returns:
            The wrapped strategy's prepared save; its plan, if it has one, is kept with the assignment.

        Raises:
            CheckpointingException: the wrapped strategy cannot save asynchronously.
        """
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
        """Assign the shards as before, and let the wrapped strategy reuse its own plan.

        Returns:
            The prepared save, or None if the wrapped strategy cannot reuse its plan.
        """
        assigned = list(map(build_copy, shards))
        for shard, replica_id in zip(assigned, plan.replica_ids, strict=True):
            shard.replica_id = replica_id
        strategy = cast("AsyncSaveStrategy", self._strategy)  # only such a strategy has made a plan
        return strategy.replan(plan.plan, assigned, common, context)

    @property
    def plan_cache_key(self) -> Hashable | None:
        """The group and the wrapped strategy's own key; None if the strategy has none."""
        strategy_key = find_plan_cache_key(self._strategy)
        if strategy_key is None:
            return None
        try:  # weak: a cached plan must not keep a process group alive
            group = self._group and weakref.ref(self._group)
        except TypeError:  # not a group: torch gives a placeholder to ranks that are no members
            return None
        return type(self), group, strategy_key

    def note_assignment(self, assigned: Mapping[Any, Assignment], shards: Sequence[ShardedBase]) -> None:
        """Do nothing; a subclass may keep the assignment.

        Args:
            assigned: The assignment of the group's shards, by their ids; ranks are numbers in the group.
            shards: This rank's.
        """

    def _assign(self, shards: Sequence[ShardedBase], context: PlanContext) -> list[ShardedBase]:
        # two phases: the ranks of the group share an error first, then all ranks that save
        with context.comm.collective_phase("assigning shards"):
            group = context.comm if self._group is None else Comm(self._group)
            with group.collective_phase("assigning shards"):
                assigned = assign_main_replicas(
                    shards, group, self._cache, lambda assigned: self.note_assignment(assigned, shards)
                )
        return assigned


def assign_main_replicas(
    shards: Sequence[ShardedBase],
    group: Comm,
    cache: PlanCache[set[Hashable]] | None = None,
    note: Callable[[Mapping[Any, Assignment]], None] | None = None,
) -> list[ShardedBase]:
    """Collective: make each shard with a main replica in the group the main one on exactly one of its ranks.

    Return copies of this rank's shards in the same order, with replica id 0 if it is to write the shard, else 1. An
    earlier assignment in ``cache`` is reused if all ranks have the same shards as then.
    """
    with group.collective_phase("listing shards"):
        copies = [describe_copy(shard) for shard in shards]

    def assign() -> set[Hashable]:
        assigned = assign_shards(group.all_gather(copies), main_only=True)
        if note is not None:
            note(assigned)
        return {shard for shard, assignment in assigned.items() if assignment.rank == group.rank}

    cache = PlanCache(0) if cache is None else cache
    mine = set(cache.find_or_plan(copies, group, assign))
    renumbered = list(map(copy.copy, shards))
    for shard in renumbered:
        key = shard_id(shard)
        shard.replica_id = 0 if key in mine else 1
        mine.discard(key)  # a rank that has the shard twice writes it once
    return renumbered
