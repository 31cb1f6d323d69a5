"""Whether a strategy stored every shard that it was given, on whichever rank and in whatever pieces."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from shardckpt.errors import PluginError, listed
from shardckpt.planning import (
    LANES,
    PRIME,
    Box,
    BoxFinder,
    Ints,
    Table,
    TensorSpec,
    are_equal_in_field,
    compute_weights,
    concat_tables,
    find_uncovered,
    fingerprint,
)
from shardckpt.storage import PackedShards
from shardckpt.validation.sharding import describe_shards, format_box

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.distributed import Comm
    from shardckpt.mapping import ShardedBase
    from shardckpt.validation.sharding import Described

_Columns: TypeAlias = "tuple[list[TensorSpec], Table]"
#: Kind and key.
_Name: TypeAlias = "tuple[str, str]"


class GivenShards:
    """The shards of this rank that a strategy was given, without data.

    Ranks compare sums over their boxes (see :func:`shardckpt.planning.table.fingerprint`). The sums do not depend on
    which rank stores a box, nor on the pieces in which it is stored. If they differ, the boxes go to the main rank,
    which decides and names what is missing: one copy too many, or another dtype, is no error.

    Args:
        described: The main replicas among the rank's shards, which a strategy must store.
        strategy: The strategy, named in errors.
    """

    def __init__(self, described: Described, strategy: object) -> None:
        #: Main replicas.
        self.described = described
        self._strategy = f"{type(strategy).__module__}.{type(strategy).__qualname__}"
        self._numbers: dict[TensorSpec, int] = {}
        self._sums = _with_empty(*described)
        #: What was recorded the last time, and by how much its sums differed: another save of the same is not summed.
        self._last: tuple[list[PackedShards], list[int]] = ([], [])

    def compare(self, recorded: Sequence[ShardedBase | PackedShards], comm: Comm) -> None:
        """Collective: compare them with what the strategy recorded as stored.

        Args:
            recorded: The shards that the files of this rank hold.
            comm: The ranks that save, all of which call.

        Raises:
            PluginError: on every rank; it names the first shards that were given and not stored, or stored and not
                given.
        """
        with comm.local_phase("summing up what was stored"):
            difference = self._difference(recorded)
        if are_equal_in_field(comm.total(*difference), [0] * LANES):
            return
        everyone = comm.gather((self.described[:2], _columns(recorded)))
        with comm.collective_phase("comparing what was stored with what was given"):
            if comm.is_main:
                _refuse([given for given, _ in everyone], [stored for _, stored in everyone], self._strategy)

    def _difference(self, recorded: Sequence[ShardedBase | PackedShards]) -> list[int]:
        packed = [part for part in recorded if isinstance(part, PackedShards)]
        again = len(packed) == len(recorded) > 0
        if again and packed == self._last[0]:
            return self._last[1]
        specs, table = _columns(recorded)
        weights = self._weights(specs)
        sums = _with_empty(specs, table, weights, fingerprint(table, weights))
        difference = [(found - given) % PRIME for found, given in zip(sums, self._sums, strict=True)]
        if again:
            self._last = packed, difference
        return difference

    def _weights(self, specs: list[TensorSpec]) -> torch.Tensor:
        """As :func:`shardckpt.planning.table.compute_weights`, which takes longer than to look them up."""
        if specs == self.described.specs:
            return self.described.weights
        self._numbers = self._numbers or {spec: number for number, spec in enumerate(self.described.specs)}
        try:
            return self.described.weights[list(map(self._numbers.__getitem__, specs))]
        except KeyError:
            return compute_weights(specs)


class _Part(NamedTuple):
    """A box, with its global shape and the rank that has it."""

    rank: int
    shape: Ints
    box: Box


def _columns(recorded: Iterable[ShardedBase | PackedShards]) -> _Columns:
    """What was recorded in one table."""
    packed: list[_Columns] = []
    shards: list[ShardedBase] = []
    for part in recorded:
        if isinstance(part, PackedShards):
            packed.append(part.unpack())
        else:
            shards.append(part)
    if not shards and len(packed) == 1:
        return packed[0]
    specs: list[TensorSpec] = []
    tables = []
    for more, table in [*packed, describe_shards(shards, copies=True)[:2]]:
        tables.append(table._replace(spec=table.spec + len(specs)))
        specs += more
    return specs, concat_tables(tables)


def _with_empty(specs: list[TensorSpec], table: Table, weights: torch.Tensor, sums: list[int]) -> list[int]:
    """A fingerprint in which the boxes of empty tensors count as well, which fill nothing."""
    empty = [number for number, spec in enumerate(specs) if 0 in spec.shape]
    if not empty:
        return sums
    counts = torch.bincount(table.spec, minlength=len(specs))[empty, None]
    return [(one + more) % PRIME for one, more in zip(sums, (counts * weights[empty]).sum(0).tolist(), strict=True)]


def _refuse(given: list[_Columns], stored: list[_Columns], strategy: str) -> None:
    """Raise if what all ranks were given is not what all have stored."""
    was_given, was_stored = _by_name(given), _by_name(stored)
    if was_given and not was_stored:
        raise PluginError(
            f"{strategy} has not said what it stored of {len(was_given)} tensors and objects: call "
            "context.writer.record_shards(shards) with those that a rank's files hold, on every rank"
        )
    faults = [
        f"{kind} {key!r}: {fault}"
        for kind, key in sorted(was_given.keys() | was_stored.keys())
        for fault in _faults(was_given.get((kind, key), []), was_stored.get((kind, key), []))
    ]
    if faults:
        raise PluginError(
            f"{strategy} has not stored what it was given, as its calls of context.writer.record_shards say:\n  "
            + listed(faults, "\n  ")
        )


def _by_name(columns: Iterable[_Columns]) -> dict[_Name, list[_Part]]:
    found: dict[_Name, list[_Part]] = defaultdict(list)
    for rank, (specs, table) in enumerate(columns):
        corners = zip(table.spec.tolist(), table.offset.tolist(), table.extent.tolist(), strict=True)
        for number, offset, extent in corners:
            kind, key, _, shape = specs[number]
            axes = len(shape)
            found[kind, key].append(_Part(rank, shape, Box(tuple(offset[:axes]), tuple(extent[:axes]))))
    return dict(found)


def _faults(given: list[_Part], stored: list[_Part]) -> Iterator[str]:
    """What is wrong with one tensor or object: the first of it."""
    if not given:
        yield f"rank {stored[0].rank} has stored it, and no rank was given it"
    elif not stored:
        yield f"rank {given[0].rank} was given it, and no rank has stored any of it"
    elif stored[0].shape != given[0].shape or len({part.shape for part in stored}) > 1:
        yield f"it was given with the global shape {given[0].shape}, and stored with {stored[0].shape}"
    else:
        finder = BoxFinder(list({part.box: None for part in stored if part.box.volume}))
        for part in given:
            missing = find_uncovered(part.box, finder) if part.box.volume else None
            if missing is not None:
                yield f"rank {part.rank} was given {format_box(missing)}, which no rank has stored"
                return


__all__ = ["GivenShards"]
