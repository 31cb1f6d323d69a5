"""Fully parallel loads: a shard that several ranks want is read by one of them, which sends it to the others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch

from shardckpt.distributed.comm import Comm
from shardckpt.engine.load_results import check_values
from shardckpt.engine.plan_cache import PlanCache
from shardckpt.errors import CheckpointingException, PluginError, show_given
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.parallel.reading_plan import ReadingPlan, WantedShard, plan_reading
from shardckpt.parallel.transfers import ROUND_BYTES, check_algorithm, exchange_shards, is_fillable
from shardckpt.planning.shard_copies import shard_id, shard_nbytes
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage.memory_budget import LEAST_READING, check_memory_budget, parse_memory_budget
from shardckpt.strategy import BuildsObjects, LoadStrategy, OwnsFiles, Recognises, lists_columns

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.manifest.models import Manifest
    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.mapping.sharded_object import ShardedObject
    from shardckpt.strategy import LoadContext, StoredColumns


class FullyParallelLoadStrategyWrapper(LoadStrategy):
    """Loads through another strategy, and reads a shard that several ranks of a group want only once from storage.

    Each shard is assigned, balanced by bytes, to one of the ranks that want it. That rank reads it, and sends it to the
    ranks that want the same shard in the same dtype, and to no others. The result is the same as without this wrapper.
    Objects, which are small, and tensors that are not plain ones (quantized ones, for example) are not shared: every
    rank reads its own. Tied tensors, which share their memory, are read and sent as one.

    ``load(fully_parallel=True)`` is the short way; this class has the options.

    Example:
        Ranks of a data-parallel group read a part each, and exchange::

            strategy = FullyParallelLoadStrategyWrapper(load_strategy, data_parallel_group)
            state_dict = load(sharded_state_dict, path, sharded_strategy=strategy)

    Args:
        strategy: Reads the checkpoint.
        group: The ranks that share the reading (data parallel); by default all that load.
        do_cache_distribution: Keep the assignment for the next load with this instance. It is reused as long as all
            ranks of the group want the same as before, which each load checks; a reuse saves two all-gathers.
            (Megatron's ``pg_cache_path``, an assignment from a file that nothing checks, is not supported.)
        exchange_algo: How ranks exchange shards. ``"broadcast"``: point to point, or a broadcast if all ranks of the
            group want a shard. ``"gather_rounds"``: always point to point. ``"gather_object"``: as pickles, to all
            ranks, for debugging. ``"direct"``: no exchange, every rank reads all that it wants.
        per_rank_object_load: Accepted for Megatron's callers: each rank reads its own objects either way.
        parallelization_group: The name of ``group`` in Megatron until 0.16.
        round_bytes: Bytes that a rank sends, and receives, at most in one round; the same on every rank.

    Raises:
        CheckpointingException: there is no such ``exchange_algo``, or ``round_bytes`` is no such number.
        PluginError: ``strategy`` is no instance of a load strategy.
    """

    recognises: Callable[[Path], int | None]
    owned_files: Callable[[Path], set[str]]
    can_build: Callable[[Sequence[ShardedObject], LoadContext], list[bool]]
    list_columns: Callable[[LoadContext], StoredColumns]

    def __init__(
        self,
        strategy: LoadStrategy,
        group: ProcessGroup | None = None,
        do_cache_distribution: bool = False,
        exchange_algo: str = "broadcast",
        per_rank_object_load: bool = False,  # noqa: ARG002 - see the class
        *,
        parallelization_group: ProcessGroup | None = None,
        round_bytes: int = ROUND_BYTES,
    ) -> None:
        if not isinstance(strategy, LoadStrategy):
            raise PluginError(f"{type(self).__name__} wraps an instance of a load strategy, not {show_given(strategy)}")
        check_algorithm(exchange_algo, from_storage=True)
        if not isinstance(round_bytes, SupportsIndex) or round_bytes < 1:  # type: ignore[redundant-expr]
            raise CheckpointingException(
                f"round_bytes={show_given(round_bytes)}: it is a whole number of bytes, 1 or more, {ROUND_BYTES} by "
                "default"
            )
        self._strategy = strategy
        self._group = parallelization_group if group is None else group
        self._settings = (exchange_algo, round_bytes)
        #: Of this instance, as Megatron has it, and not the engine's: see :class:`shardckpt.engine.PlanCache`.
        self._cache: PlanCache[ReadingPlan] = PlanCache(int(do_cache_distribution))
        self.backend = strategy.backend  # type: ignore[misc]
        self.version = strategy.version  # type: ignore[misc]
        self.reads = strategy.reads  # type: ignore[misc]
        if isinstance(strategy, Recognises):
            self.recognises = strategy.recognises
        if isinstance(strategy, OwnsFiles):
            self.owned_files = strategy.owned_files
        if isinstance(strategy, BuildsObjects):
            self.can_build = strategy.can_build
        if lists_columns(strategy):
            self.list_columns = strategy.list_columns

    def cannot_load(self, manifest: Manifest) -> str | None:
        """Return why the wrapped strategy cannot load the checkpoint, or None if it can."""
        return self._strategy.cannot_load(manifest)

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the common state, as the wrapped strategy loads it."""
        return self._strategy.load_common(context)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored shards without data, as the wrapped strategy lists them."""
        return self._strategy.load_index(context)

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: assign the shards to ranks, read this rank's, and exchange them.

        Args:
            wanted: This rank's shards; tensors that have data are filled in place.
            context: The checkpoint, and the ranks that load.

        Returns:
            The value of every wanted shard, in their order.

        Raises:
            PluginError: on every rank: the wrapped strategy did not return a fitting value for each shard.
        """
        # two phases: the ranks of the group share an error first, then all ranks that load
        with context.comm.collective_phase("assigning reads"):
            group = context.comm if self._group is None else Comm(self._group)
            with group.collective_phase("assigning reads"):
                plan = self._plan(wanted, group)
        values: list[Any] = [None] * len(wanted)
        with context.comm.collective_phase("reading this rank's part"):
            # with the shards that share their memory: the strategy must see that they are tied
            tied = _find_tied(wanted)
            numbers = sorted({number for first in plan.reads for number in tied.get(first, (first,))})
            mine = [wanted[number] for number in numbers]
            # before it is sent to others: with another shape they would wait for more bytes
            read = check_values(self._strategy, mine, self._strategy.load(mine, context), get_plugin_manager(), dict)
            for number, value in zip(numbers, read, strict=True):
                values[number] = value
        with context.comm.collective_phase("exchanging shards"), group.collective_phase("exchanging shards"):
            self._share(wanted, values, plan, group)
        return values

    def _plan(self, wanted: Sequence[ShardedBase], group: Comm) -> ReadingPlan:
        with group.collective_phase("listing this rank's shards"):
            wants = [_describe_wanted(shard, (group.rank, number)) for number, shard in enumerate(wanted)]
            # Tied shards get one id together, so that the rank that reads one of them reads all: of two keys the
            # checkpoint may lack one, and memory that was read by that key alone would have its earlier values.
            described = list(wants)
            for numbers in _find_tied(wanted).values():
                together = tuple(described[number].shard for number in numbers)
                for number in numbers:
                    wants[number] = described[number]._replace(shard=together)
        return self._cache.find_or_plan(
            (self._settings, wants), group, lambda: plan_reading(wants, self._settings, group)
        )

    def _share(self, wanted: Sequence[ShardedBase], values: list[Any], plan: ReadingPlan, group: Comm) -> None:
        """Collective: add the values that other ranks of the group have read to ``values``."""
        shards = {shard: cast("ShardedTensor", wanted[position]) for shard, position in plan.positions.items()}
        with group.local_phase("casting tensors"):
            for shard, position in plan.positions.items():
                if plan.transfers[shard].source == group.rank:
                    values[position] = values[position].to(shards[shard].dtype)
        loaded = {shard: values[position] for shard, position in plan.positions.items()}
        received = exchange_shards(plan.transfers, loaded, shards, group, *self._settings)
        for shard, value in received.items():
            values[plan.positions[shard]] = value
        # after the exchange: the shard that is copied may have come from another rank
        with group.collective_phase("copying shards that were requested twice"):
            for position, first in plan.repeats:  # tensors: no object is wanted twice, since each has an id of its own
                values[position] = cast("ShardedTensor", wanted[position]).data
                if values[position] is None:
                    values[position] = values[first].clone()
                else:
                    values[position].detach().copy_(values[first])


def share_reading(checkpoint: OpenCheckpoint, memory_budget: int | None = None) -> OpenCheckpoint:
    """Return the open checkpoint with its strategy wrapped: one rank reads the shards that several ranks want.

    ``memory_budget`` is the bytes that this rank may hold at a time next to the tensors; the same on every rank. The
    reader of the checkpoint has half of it: :func:`split_budget`.
    """
    sent = ROUND_BYTES if memory_budget is None else min(ROUND_BYTES, memory_budget // 4)
    strategy = FullyParallelLoadStrategyWrapper(checkpoint.strategy, round_bytes=sent)
    return replace(checkpoint, strategy=strategy, fully_parallel=True)


def split_budget(memory_budget: int | str | None, *, fully_parallel: bool) -> tuple[int | None, int | None]:
    """Return the bytes of a load's memory budget, and its reader's share of them; None for no budget.

    With ``fully_parallel`` ranks send each other the shards that they read: that takes the other half, for both
    directions. If the budget is too small, the error says the smallest that works.
    """
    budget = parse_memory_budget(memory_budget)
    if budget is None:
        return None, None
    shares = 2 if fully_parallel else 1
    check_memory_budget(
        budget,
        shares * LEAST_READING,
        "a fully parallel load takes" if fully_parallel else "to read a checkpoint takes",
    )
    return budget, budget // shares


def _find_tied(wanted: Sequence[ShardedBase]) -> dict[int, list[int]]:
    """Find tied shards, which have several keys and one memory: the positions of each such set, by its first position.

    A position is a shard's index in ``wanted``.
    """
    found: dict[Hashable, list[int]] = {}
    for number, shard in enumerate(wanted):
        if not isinstance(shard, ShardedTensor) or shard.data is None or not is_fillable(shard.data):
            continue
        data = shard.data
        if data.numel():  # empty ones have no memory of their own
            position = tuple(shard.global_shape), tuple(shard.global_offset), tuple(data.shape), data.stride()
            found.setdefault((data.data_ptr(), data.device, data.dtype, position), []).append(number)
    return {numbers[0]: numbers for numbers in found.values() if len({wanted[number].key for number in numbers}) > 1}


def _describe_wanted(shard: ShardedBase, own: tuple[int, int]) -> WantedShard:
    """Describe a shard for the other ranks; ``own`` is its id if it cannot be shared with them."""
    if not isinstance(shard, ShardedTensor):
        return WantedShard(own, (), torch.uint8, shard_nbytes(shard), "cpu", can_share=False)
    if shard.data is not None and not is_fillable(shard.data):
        return WantedShard(own, shard.data_shape, shard.dtype, shard_nbytes(shard), "cpu", can_share=False)
    # besides the id, everything that decides which values a load writes into the shard's memory
    reading = (tuple(shard.global_shape), shard.prepend_axis_num, shard.allow_shape_mismatch, shard.dtype)
    device_type = "cpu" if shard.data is None else shard.data.device.type
    return WantedShard((shard_id(shard), *reading), shard.data_shape, shard.dtype, shard_nbytes(shard), device_type)
