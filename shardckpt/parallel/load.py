"""Fully parallel loads: a shard that several ranks want is read by one of them, which sends it to the others."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from shardckpt.distributed import Comm
from shardckpt.engine import PlanCache
from shardckpt.errors import CheckpointingException, PluginError
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel.transfers import ROUND_BYTES, Transfer, check_algorithm, exchange
from shardckpt.planning import OBJECT_BYTES, deal, holders_by_shard
from shardckpt.strategy import LoadStrategy, OwnsFiles, Recognises

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from pathlib import Path

    from torch.distributed import ProcessGroup

    from shardckpt.manifest import Manifest
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.strategy import LoadContext


class _Want(NamedTuple):
    """What a rank tells the others of a shard that it wants.

    Attributes:
        shard: What the same shard has in common on all ranks; a rank that must read for itself puts itself into it.
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
    """Who reads what, and where it goes; shards are named by their numbers among the wanted.

    Attributes:
        reads: What this rank reads.
        transfers: What ranks of the group send each other.
        places: The shard that each transfer brings to or takes from this rank, None where it is no party.
        twins: Shards that this rank wants a second time, each with the first.
    """

    reads: list[int]
    transfers: list[Transfer]
    places: list[int | None]
    twins: list[tuple[int, int]]


class FullyParallelLoadStrategyWrapper(LoadStrategy):
    """Loads through another strategy, and reads from storage once what several ranks of a group want.

    The shards are dealt by bytes to the ranks that want them; each goes from its reader to the others that want the
    same shard in the same dtype, and to no one else. What is loaded is the same as without it. Every rank reads for
    itself its objects, which are small, and destinations other than plain tensors (quantized ones, for example).

    Args:
        strategy: Reads the checkpoint.
        group: The ranks that share the reading (data parallel); by default all that load.
        do_cache_distribution: Keep the deal for the next load with this instance; it is used as long as no rank of the
            group wants anything else, which is checked each time, and spares the gathering of what all want.
            (Megatron's ``pg_cache_path``, a deal from a file that nothing checks, is not taken.)
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
        check_algorithm(exchange_algo)
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
        """Deal out the reading, read this rank's part, and exchange."""
        with context.comm.phase("dealing out the reading"):
            group = context.comm if self._group is None else Comm(self._group)
            with group.phase("dealing out the reading"):
                plan = self._plan(wanted, group)
        values: list[Any] = [None] * len(wanted)
        with context.comm.phase("reading this rank's part"):
            read = self._strategy.load([wanted[number] for number in plan.reads], context)
            for number, value in zip(plan.reads, read, strict=True):
                values[number] = value
        with context.comm.phase("sharing what was read"), group.phase("sharing what was read"):
            self._share(wanted, values, plan, group)
        return values

    def _plan(self, wanted: Sequence[ShardedBase], group: Comm) -> _Plan:
        with group.phase("listing what this rank wants"):
            wants = [_want(shard, (group.rank, number)) for number, shard in enumerate(wanted)]
        told = (self._settings, [] if self._settings[0] == "direct" else wants)
        share = (self._settings, wants)
        return self._cache.find_or_plan(share, group, lambda: _dealt(wants, group.all_gather(told), group))

    def _share(self, wanted: Sequence[ShardedBase], values: list[Any], plan: _Plan, group: Comm) -> None:
        with group.phase("preparing the exchange"):
            for transfer, place in zip(plan.transfers, plan.places, strict=True):
                if place is not None:
                    shard = cast("ShardedTensor", wanted[place])
                    is_reader = transfer.reader == group.rank
                    values[place] = _checked(shard, values[place]) if is_reader else _memory(shard)
            tensors = [None if place is None else values[place] for place in plan.places]
        algorithm, round_bytes = self._settings
        if plan.transfers:
            exchange(plan.transfers, tensors, group, algorithm, round_bytes)
        with group.phase("copying shards that are wanted twice"):
            for number, first in plan.twins:
                values[number] = _copied(wanted[number], values[first])


def _want(shard: ShardedBase, own: tuple[int, int]) -> _Want:
    """A shard as the others need to know it; ``own`` stands for it if they cannot have the same."""
    if not isinstance(shard, ShardedTensor):
        return _Want(own, (), torch.uint8, OBJECT_BYTES, "cpu")
    shape, nbytes = shard.data_shape, math.prod(shard.data_shape) * shard.dtype.itemsize
    if shard.data is not None and not _is_plain(shard.data):
        return _Want(own, shape, shard.dtype, nbytes, "cpu")
    device_type = "cpu" if shard.data is None else shard.data.device.type
    return _Want(_identity(shard), shape, shard.dtype, nbytes, device_type)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing but memory that can be filled."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    return (
        type(tensor) in kinds
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type != "meta"
    )


def _identity(shard: ShardedTensor) -> tuple[Any, ...]:
    """All that decides what a load puts into the shard's memory."""
    part = shard.flattened_range
    return (
        shard.key,
        tuple(shard.global_shape),
        tuple(shard.global_offset),
        tuple(shard.local_shape),
        None if part is None else (part.start, part.stop),
        shard.prepend_axis_num,
        shard.allow_shape_mismatch,
        shard.dtype,
    )


def _dealt(mine: list[_Want], everyone: list[tuple[tuple[str, int], list[_Want]]], group: Comm) -> _Plan:
    """The plan, from what this rank wants and what all have told each other."""
    with group.phase("dealing out the reading"):
        for rank, (settings, _) in enumerate(everyone):
            if settings != everyone[0][0]:
                raise CheckpointingException(
                    f"ranks disagree on exchange_algo and round_bytes: {everyone[0][0]} on rank 0, {settings} on rank "
                    f"{rank} of the group; pass the same on every rank"
                )
        plan = _plan_of(mine, [wants for _, wants in everyone], group)
    return plan


def _plan_of(mine: list[_Want], everyone: list[list[_Want]], group: Comm) -> _Plan:
    holders = holders_by_shard([want.shard for want in wants] for wants in everyone)
    copies: dict[Hashable, list[_Want]] = {}
    for want in itertools.chain.from_iterable(everyone):
        copies.setdefault(want.shard, []).append(want)
    sizes = [copies[shard][0].nbytes for shard in holders]
    readers = dict(zip(holders, deal(list(holders.values()), sizes), strict=True))
    first = {want.shard: number for number, want in reversed(list(enumerate(mine)))}
    shared = [shard for shard, ranks in holders.items() if len(ranks) > 1]
    return _Plan(
        reads=sorted(number for shard, number in first.items() if readers.get(shard, group.rank) == group.rank),
        transfers=[_transfer(copies[shard], readers[shard], holders[shard], group) for shard in shared],
        places=[first.get(shard) for shard in shared],
        twins=[(number, first[want.shard]) for number, want in enumerate(mine) if first[want.shard] != number],
    )


def _transfer(copies: list[_Want], reader: int, ranks: tuple[int, ...], group: Comm) -> Transfer:
    others = tuple(rank for rank in ranks if rank != reader)
    return Transfer(copies[0].shape, copies[0].dtype, reader, others, _way({c.device_type for c in copies}, group))


def _way(device_types: set[str], group: Comm) -> str:
    """The kind of device over which a shard for such destinations goes."""
    device_type = next(iter(device_types))
    return device_type if len(device_types) == 1 and group.moves(device_type) else "cpu"


def _checked(shard: ShardedTensor, value: Any) -> torch.Tensor:
    """What the strategy has read, as the others expect it."""
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shard.data_shape:
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise PluginError(f"{shard.key!r}: the strategy gave {given}, not a tensor of shape {shard.data_shape}")
    return value.to(shard.dtype)


def _memory(shard: ShardedTensor) -> torch.Tensor:
    """Where a shard from another rank goes."""
    return torch.empty(shard.data_shape, dtype=shard.dtype, device="cpu") if shard.data is None else shard.data


def _copied(shard: ShardedBase, value: torch.Tensor) -> torch.Tensor:
    """The same values in the shard's own memory."""
    if not isinstance(shard, ShardedTensor) or shard.data is None:
        return value.clone()
    shard.data.detach().copy_(value)
    return shard.data


__all__ = ["FullyParallelLoadStrategyWrapper"]
