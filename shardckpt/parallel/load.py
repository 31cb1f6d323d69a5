"""Fully parallel loads: a shard that several ranks want is read by one of them, which sends it to the others."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from shardckpt.distributed import Comm
from shardckpt.engine import PlanCache
from shardckpt.errors import CheckpointingException, PluginError
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.transfers import (
    ROUND_BYTES,
    Transfer,
    check_algorithm,
    choose_device,
    exchange_shards,
    is_plain,
)
from shardckpt.planning import assign_holders, find_holders, shard_id, shard_nbytes
from shardckpt.strategy import LoadStrategy, OwnsFiles, Recognises

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardckpt.manifest import Manifest
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.strategy import LoadContext


class _Want(NamedTuple):
    """What a rank announces of a shard that it wants.

    Attributes:
        shard: The same on all ranks that can share what is read; else this rank's own.
        shape: Of the local tensor.
        dtype: Of the local tensor.
        nbytes: Its size.
        device_type: Kind of device of its destination.
    """

    shard: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    device_type: str


class _Plan(NamedTuple):
    """Who reads what, and where it goes. A position is that of a shard among those that this rank wants.

    Attributes:
        reads: Positions of what this rank reads.
        transfers: What ranks of the group send each other, by shard; the same on every rank.
        positions: Where this rank has the shards that it sends or receives.
        repeats: Positions of shards that this rank wants a second time, each with that of the first.
    """

    reads: list[int]
    transfers: dict[Hashable, Transfer]
    positions: dict[Hashable, int]
    repeats: list[tuple[int, int]]


class FullyParallelLoadStrategyWrapper(LoadStrategy):
    """Loads through another strategy, and reads from storage once what several ranks of a group want.

    Each shard is assigned, balanced by bytes, to one of the ranks that want it, which reads it and sends it to the
    others that want the same shard in the same dtype, and to no one else. What is loaded is the same as without it.
    Every rank reads for itself its objects, which are small, and destinations other than plain tensors (quantized
    ones, for example).

    Args:
        strategy: Reads the checkpoint.
        group: The ranks that share the reading (data parallel); by default all that load.
        do_cache_distribution: Keep the assignment for the next load with this instance; it is used as long as no rank
            of the group wants anything else, which is checked each time, and spares the gathering of what all want.
            (Megatron's ``pg_cache_path``, an assignment from a file that nothing checks, is not taken.)
        exchange_algo: How shards travel. ``"broadcast"``: from rank to rank, or a true broadcast where the whole group
            wants a shard. ``"gather_rounds"``: all from rank to rank. ``"gather_object"``: as pickles, to all, for
            debugging. ``"direct"``: not at all, every rank reads what it wants.
        per_rank_object_load: Accepted for Megatron's callers: each rank reads its own objects either way.
        parallelization_group: The name of ``group`` in Megatron until 0.16.
        round_bytes: Bytes that a rank sends, and receives, at most at a time; the same on every rank.
    """

    recognises: Callable[[Path], int | None]
    owned_files: Callable[[Path], set[str]]

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
        check_algorithm(exchange_algo, from_storage=True)
        self._strategy = strategy
        self._group = parallelization_group if group is None else group
        self._settings = (exchange_algo, round_bytes)
        self._cache: PlanCache[_Plan] = PlanCache(int(do_cache_distribution))
        self.backend = strategy.backend  # type: ignore[misc]
        self.version = strategy.version  # type: ignore[misc]
        self.reads = strategy.reads  # type: ignore[misc]
        if isinstance(strategy, Recognises):
            self.recognises = strategy.recognises
        if isinstance(strategy, OwnsFiles):
            self.owned_files = strategy.owned_files

    def cannot_load(self, manifest: Manifest) -> str | None:
        """What the strategy says."""
        return self._strategy.cannot_load(manifest)

    def load_common(self, context: LoadContext) -> StateDict:
        """What the strategy loads."""
        return self._strategy.load_common(context)

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """What the strategy finds."""
        return self._strategy.load_index(context)

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: assign the reading, read this rank's part, and exchange."""
        with context.comm.collective_phase("assigning the reading"):
            group = context.comm if self._group is None else Comm(self._group)
            with group.collective_phase("assigning the reading"):
                plan = self._plan(wanted, group)
        values: list[Any] = [None] * len(wanted)
        with context.comm.collective_phase("reading this rank's part"):
            read = self._strategy.load([wanted[number] for number in plan.reads], context)
            for number, value in zip(plan.reads, read, strict=True):
                values[number] = value
        with context.comm.collective_phase("sharing what was read"), group.collective_phase("sharing what was read"):
            self._share(wanted, values, plan, group)
        return values

    def _plan(self, wanted: Sequence[ShardedBase], group: Comm) -> _Plan:
        with group.collective_phase("listing what this rank wants"):
            wants = [_want(shard, (group.rank, number)) for number, shard in enumerate(wanted)]
        announced = (self._settings, [] if self._settings[0] == "direct" else wants)
        share = (self._settings, wants)
        return self._cache.find_or_plan(share, group, lambda: _plan_together(wants, group.all_gather(announced), group))

    def _share(self, wanted: Sequence[ShardedBase], values: list[Any], plan: _Plan, group: Comm) -> None:
        """Collective: complete the values by what other ranks of the group have read."""
        shards = {shard: cast("ShardedTensor", wanted[position]) for shard, position in plan.positions.items()}
        with group.local_phase("checking what was read"):
            for shard, position in plan.positions.items():
                if plan.transfers[shard].source == group.rank:
                    values[position] = _check_value(shards[shard], values[position])
        loaded = {shard: values[position] for shard, position in plan.positions.items()}
        received = exchange_shards(plan.transfers, loaded, shards, group, *self._settings)
        for shard, value in received.items():
            values[plan.positions[shard]] = value
        with group.collective_phase("copying shards that are wanted twice"):
            for position, first in plan.repeats:
                values[position] = _copy_to(wanted[position], values[first])


def _want(shard: ShardedBase, own: tuple[int, int]) -> _Want:
    """Describe a shard for the other ranks; ``own`` stands for it if it cannot be shared with them."""
    if not isinstance(shard, ShardedTensor):
        return _Want(own, (), torch.uint8, shard_nbytes(shard), "cpu")
    if shard.data is not None and not is_plain(shard.data):
        return _Want(own, shard.data_shape, shard.dtype, shard_nbytes(shard), "cpu")
    # all that decides what a load puts into the shard's memory
    reading = (tuple(shard.global_shape), shard.prepend_axis_num, shard.allow_shape_mismatch, shard.dtype)
    device_type = "cpu" if shard.data is None else shard.data.device.type
    return _Want((shard_id(shard), *reading), shard.data_shape, shard.dtype, shard_nbytes(shard), device_type)


def _plan_together(mine: list[_Want], everyone: list[tuple[tuple[str, int], list[_Want]]], group: Comm) -> _Plan:
    """Collective: make the plan from what this rank wants, and what all ranks have announced."""
    with group.collective_phase("assigning the reading"):
        for rank, (settings, _) in enumerate(everyone):
            if settings != everyone[0][0]:
                raise CheckpointingException(
                    f"ranks disagree on exchange_algo and round_bytes: {everyone[0][0]} on rank 0, {settings} on rank "
                    f"{rank} of the group; pass the same on every rank"
                )
        plan = _make_plan(mine, [wants for _, wants in everyone], group)
    return plan


def _make_plan(mine: list[_Want], everyone: list[list[_Want]], group: Comm) -> _Plan:
    holders = find_holders([want.shard for want in wants] for wants in everyone)
    copies: dict[Hashable, list[_Want]] = {}
    for want in itertools.chain.from_iterable(everyone):
        copies.setdefault(want.shard, []).append(want)
    sizes = [copies[shard][0].nbytes for shard in holders]
    sources = dict(zip(holders, assign_holders(list(holders.values()), sizes), strict=True))
    first = {want.shard: position for position, want in reversed(list(enumerate(mine)))}
    transfers = {
        shard: _plan_transfer(copies[shard], sources[shard], ranks, group)
        for shard, ranks in holders.items()
        if len(ranks) > 1
    }
    return _Plan(
        reads=sorted(position for shard, position in first.items() if sources.get(shard, group.rank) == group.rank),
        transfers=transfers,
        positions={shard: first[shard] for shard in transfers if shard in first},
        repeats=[(position, first[want.shard]) for position, want in enumerate(mine) if first[want.shard] != position],
    )


def _plan_transfer(copies: list[_Want], source: int, ranks: tuple[int, ...], group: Comm) -> Transfer:
    targets = tuple(rank for rank in ranks if rank != source)
    device_type = choose_device({copy.device_type for copy in copies}, group)
    return Transfer(copies[0].shape, copies[0].dtype, source, targets, device_type)


def _check_value(shard: ShardedTensor, value: Any) -> torch.Tensor:
    """Return what the strategy has read in the shard's dtype; raise if it does not fit."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shard.data_shape:
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PluginError(f"{shard.key!r}: the strategy gave {given}, not a tensor of shape {shard.data_shape}")
    return value.to(shard.dtype)


def _copy_to(shard: ShardedBase, value: torch.Tensor) -> torch.Tensor:
    """Copy values into the shard's own memory, or into new memory; return it."""
    if not isinstance(shard, ShardedTensor) or shard.data is None:
        return value.clone()
    shard.data.detach().copy_(value)
    return shard.data


__all__ = ["FullyParallelLoadStrategyWrapper"]
