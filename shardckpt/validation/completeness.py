"""Check that a strategy stored every shard that it was given, on any rank and in boxes of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.errors import PluginError, listed
from shardckpt.planning.coverage import find_uncovered
from shardckpt.planning.lookup import BoxFinder
from shardckpt.planning.table import (
    LANES,
    PRIME,
    Table,
    TensorSpec,
    are_equal_in_field,
    compute_weights,
    concat_tables,
    fingerprint,
)
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.validation.sharding import RankBox, describe_shards, format_box, group_by_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.validation.sharding import Columns, ShardColumns


class GivenShards:
    """The shards of this rank that a strategy was given, without data; ``columns`` are its main replicas, to be stored.

    Ranks compare fingerprints of their boxes (see :func:`shardckpt.planning.table.fingerprint`). These do not depend on
    which rank stores a box, nor on the smaller boxes that it is stored as. If they differ, all boxes go to the main
    rank, which names the missing ones. A second copy of a shard, or another dtype, is no error.
    """

    def __init__(self, columns: ShardColumns, strategy: object) -> None:
        #: This rank's main replicas.
        self.columns = columns
        self._strategy = f"{type(strategy).__module__}.{type(strategy).__qualname__}"
        self._numbers: dict[TensorSpec, int] = {}
        self._sums = _count_empty(columns.specs, columns.table, columns.weights, columns.sums)
        #: The last recorded shards, and their difference: a training loop records the same shards at every step.
        self._last: tuple[list[PackedShards], list[int]] = ([], [])

    def compare(self, recorded: Sequence[ShardedBase | PackedShards], comm: Comm) -> None:
        """Collective: compare the shards with the shards in this rank's files, as the strategy recorded them.

        The PluginError, on every rank, names the first shards that were given and not stored, or stored and not given.
        """
        with comm.local_phase("describing the stored shards"):
            difference = self._difference(recorded)
        # summed over all ranks: a rank may store another rank's shards
        if are_equal_in_field(comm.total(*difference), [0] * LANES):
            return
        everyone = comm.gather(((self.columns.specs, self.columns.table), _join_columns(recorded)))
        with comm.collective_phase("comparing the stored shards with the given ones"):
            if comm.is_main:
                _refuse([given for given, _ in everyone], [stored for _, stored in everyone], self._strategy)

    def _difference(self, recorded: Sequence[ShardedBase | PackedShards]) -> list[int]:
        packed = [part for part in recorded if isinstance(part, PackedShards)]
        is_packed = len(packed) == len(recorded) > 0  # only then it is cheap to compare
        if is_packed and packed == self._last[0]:
            return self._last[1]
        specs, table = _join_columns(recorded)
        weights = self._weights(specs)
        sums = _count_empty(specs, table, weights, fingerprint(table, weights))
        difference = [(found - given) % PRIME for found, given in zip(sums, self._sums, strict=True)]
        if is_packed:
            self._last = packed, difference
        return difference

    def _weights(self, specs: list[TensorSpec]) -> torch.Tensor:
        """Return the weights of the specs; most are known already, and hashing takes longer than a lookup."""
        if specs == self.columns.specs:
            return self.columns.weights
        self._numbers = self._numbers or {spec: number for number, spec in enumerate(self.columns.specs)}
        try:
            return self.columns.weights[list(map(self._numbers.__getitem__, specs))]
        except KeyError:
            return compute_weights(specs)


def _join_columns(recorded: Iterable[ShardedBase | PackedShards]) -> Columns:
    """Return all that was recorded in one table."""
    packed: list[Columns] = []
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
    described = describe_shards(shards, copies=True)
    for part_specs, table in [*packed, (described.specs, described.table)]:
        tables.append(table._replace(spec=table.spec + len(specs)))
        specs += part_specs
    return specs, concat_tables(tables)


def _count_empty(specs: list[TensorSpec], table: Table, weights: torch.Tensor, sums: list[int]) -> list[int]:
    """Return a fingerprint that also counts the boxes of empty tensors, whose product is 0."""
    empty = [number for number, spec in enumerate(specs) if 0 in spec.shape]
    if not empty:
        return sums
    counts = torch.bincount(table.spec, minlength=len(specs))[empty, None]
    return [(one + extra) % PRIME for one, extra in zip(sums, (counts * weights[empty]).sum(0).tolist(), strict=True)]


def _refuse(given: list[Columns], stored: list[Columns], strategy: str) -> None:
    """Raise if the ranks have not stored their shards; one entry per rank, in rank order."""
    was_given, was_stored = group_by_name(given), group_by_name(stored)
    if was_given and not was_stored:
        raise PluginError(
            f"{strategy} has not recorded which of {len(was_given)} tensors and objects it stored: call "
            "context.writer.record_shards(shards) on every rank, with the shards that the rank's files hold"
        )
    faults = [
        f"{kind} {key!r}: {fault}"
        for kind, key in sorted(was_given.keys() | was_stored.keys())
        for fault in _find_faults(was_given.get((kind, key), []), was_stored.get((kind, key), []))
    ]
    if faults:
        raise PluginError(
            f"{strategy} has not stored the given shards, by its calls of context.writer.record_shards:\n  "
            + listed(faults, "\n  ")
        )


def _find_faults(given: list[RankBox], stored: list[RankBox]) -> Iterator[str]:
    """Yield the first fault of one tensor or object, if it has any."""
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
