"""Boxes of many tensors in columns: one row a box, so that a million of them are compared and checked by arithmetic."""

from __future__ import annotations

import functools
import hashlib
from array import array
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning.boxes import Ints

#: Of a prime field whose products fit into an int64.
PRIME = (1 << 31) - 1
#: Sums that are compared; one alone errs once in 2^31 / axes.
LANES = 2
#: Boxes whose products are computed at a time, in the cache of a core.
_ROWS = 1 << 14
_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
_STEP = -0x61C8864680B583EB


class TensorSpec(NamedTuple):
    """What a box is a part of: all that its holders must agree on."""

    kind: str
    key: str
    dtype: str
    shape: Ints


@dataclass
class Boxes:
    """Rows that are being collected."""

    spec: list[int] = field(default_factory=list)
    offsets: list[Ints] = field(default_factory=list)
    extents: list[Ints] = field(default_factory=list)

    def add(self, spec: int, offset: Ints, extent: Ints) -> None:
        """A box of the whole with that number."""
        self.spec.append(spec)
        self.offsets.append(offset)
        self.extents.append(extent)

    def table(self) -> Table:
        """The rows as columns."""
        axes = max(map(len, self.offsets), default=0)
        return Table(make_column(self.spec), make_matrix(self.offsets, axes, 0), make_matrix(self.extents, axes, 1))


class Table(NamedTuple):
    """Boxes in columns.

    Attributes:
        whole: int64 of shape (n,): numbers of what the boxes are parts of.
        offset: int64 of shape (n, axes): their offsets; 0 along axes that a whole does not have.
        extent: int64 of shape (n, axes): their extents; 1 along those.
    """

    spec: torch.Tensor
    offset: torch.Tensor
    extent: torch.Tensor

    def volume(self) -> torch.Tensor:
        """Elements of every box."""
        return self.extent.prod(1)

    def rows(self, which: torch.Tensor | slice) -> Table:
        """Some of the rows."""
        return Table(self.spec[which], self.offset[which], self.extent[which])

    def pad_axes(self, axes: int) -> Table:
        """The same boxes with at least so many axes."""
        return Table(self.spec, _widened(self.offset, axes, 0), _widened(self.extent, axes, 1))

    def take_axes(self, axes: int) -> Table:
        """The same boxes with their first axes alone."""
        return Table(self.spec, self.offset[:, :axes], self.extent[:, :axes])

    def hashes(self) -> torch.Tensor:
        """A number a row, equal where rows are: for sorting and matching, not for trust."""
        found = _mixed(self.spec)
        for axis in range(self.offset.shape[1]):
            found = _mixed(found + _mixed(self.offset[:, axis]) * 3 + _mixed(self.extent[:, axis] + axis))
        return found


def concat_tables(tables: list[Table]) -> Table:
    """The rows of all tables, with as many axes as the widest has."""
    axes = max((table.offset.shape[1] for table in tables), default=0)
    wide = [table.pad_axes(axes) for table in tables]
    return Table(
        torch.cat([table.spec for table in wide]),
        torch.cat([table.offset for table in wide]),
        torch.cat([table.extent for table in wide]),
    )


def make_column(values: list[int]) -> torch.Tensor:
    """A column of the values."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else _empty(0)


def sort_unique(column: torch.Tensor) -> torch.Tensor:
    """The values of a column, ascending, each once."""
    return column.unique()  # type: ignore[no-untyped-call,no-any-return]


def repeat_values(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Every value as often as its count says."""
    return values[number_groups(counts.cumsum(0))]


def number_groups(ends: torch.Tensor) -> torch.Tensor:
    """For every row, the number of the run that it is in, by the rows at which the runs end.

    (``repeat_interleave`` wakes torch's threads for a handful already.)
    """
    total = int(ends[-1]) if len(ends) else 0
    return torch.bincount(ends[:-1], minlength=total + 1)[:total].cumsum(0)


def make_matrix(rows: Sequence[Ints], axes: int, filler: int) -> torch.Tensor:
    """Rows of at most ``axes`` values as a matrix, shorter ones filled up."""
    if not rows or not axes:
        return _empty(len(rows), axes)
    if min(map(len, rows)) != axes:
        fillers = [(filler,) * (axes - count) for count in range(axes + 1)]
        rows = [(*row, *fillers[len(row)]) for row in rows]
    return torch.frombuffer(array("q", chain.from_iterable(rows)), dtype=torch.int64).view(-1, axes)


def compute_weights(specs: list[TensorSpec]) -> torch.Tensor:
    """A random element of the field for every whole and lane, the same on every rank: int64 of shape (n, lanes)."""
    texts = (f"{kind}\0{key}\0{dtype}\0{shape}" for kind, key, dtype, shape in specs)
    digests = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts]
    if not digests:
        return _empty(0, LANES)
    words = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int32).view(-1, LANES)
    return 1 + (words.to(torch.int64) & PRIME) % (PRIME - 1)


def fingerprint(table: Table, weights: torch.Tensor) -> list[int]:
    """Sums that are those of :func:`expected` if, but for odds of 1 in 10^16, the boxes fill their wholes exactly.

    A box is the product over its axes of (end - start). With every coordinate replaced by a random element of a prime
    field, the products of boxes add up to that of the whole only where all inner faces cancel: nothing is missing,
    nothing twice (Schwartz-Zippel). Sums of ranks add up as those of rows do, so that no rank needs another's boxes.
    It finds mistakes, not malice: who knows the elements could make boxes that deceive it.

    Args:
        table: Boxes.
        weights: Of their wholes, by :func:`weigh`.
    """
    return ((_products(table) * weights[table.spec] % PRIME).sum(0) % PRIME).tolist()


def find_untiled(table: Table, shapes: list[Ints]) -> list[int]:
    """Numbers of the wholes, of these shapes, that their boxes do not fill exactly."""
    sums = torch.zeros(len(shapes), LANES, dtype=torch.int64, device="cpu")
    sums.index_add_(0, table.spec, _products(table))
    wrong = sums % PRIME != _products(_filled(shapes))
    return wrong.any(1).nonzero().view(-1).tolist()


def fingerprint_specs(specs: list[TensorSpec], weights: torch.Tensor) -> list[int]:
    """The :func:`fingerprint` of boxes that fill all wholes."""
    return fingerprint(_filled([spec.shape for spec in specs]), weights)


def are_equal_in_field(found: list[int], wanted: list[int]) -> bool:
    """Whether sums of fingerprints are equal in their field."""
    return all((one - other) % PRIME == 0 for one, other in zip(found, wanted, strict=True))


def _widened(column: torch.Tensor, axes: int, filler: int) -> torch.Tensor:
    more = axes - column.shape[1]
    return torch.cat([column, column.new_full((len(column), more), filler)], 1) if more > 0 else column


def _filled(shapes: list[Ints]) -> Table:
    """One box for every whole."""
    boxes = Boxes()
    for number, shape in enumerate(shapes):
        boxes.add(number, (0,) * len(shape), shape)
    return boxes.table()


def _products(table: Table) -> torch.Tensor:
    """The product of every box in the field, in every lane; an axis of offset 0 and extent 1 counts as 1, as none."""
    axes = table.offset.shape[1]
    salts, scales = _faces(axes)
    found = torch.ones(len(table.spec), LANES, dtype=torch.int64, device="cpu")
    for first in range(0, len(found), _ROWS):
        rows = slice(first, first + _ROWS)
        low, high = table.offset[rows, :, None], (table.offset[rows] + table.extent[rows])[:, :, None]
        faces = (_elements(high, salts) - _elements(low, salts)) % PRIME * scales % PRIME
        for axis in range(axes):
            found[rows] = found[rows] * faces[:, axis] % PRIME
    return found


@functools.cache
def _faces(axes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For every axis and lane, what tells its elements apart, and what makes the face from 0 to 1 count as 1."""
    salts = _mixed(torch.arange(axes, device="cpu")[:, None] + 1000 * torch.arange(LANES, device="cpu"))
    start, end = (_elements(torch.tensor(place, device="cpu"), salts) for place in (0, 1))
    scales = [[pow(face, -1, PRIME) for face in row] for row in (end - start).tolist()]
    return salts, torch.tensor(scales, dtype=torch.int64, device="cpu").view(axes, LANES)


def _elements(values: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
    """A random element of the field for every value and salt."""
    return (_mixed(values ^ salts) & ((1 << 62) - 1)) % PRIME


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 (https://prng.di.unimi.it/splitmix64.c), in wrapping int64."""
    found = values * _STEP + _STEP
    for shift, factor in _MIX:
        found = (found ^ ((found >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return found


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cpu")


__all__ = [
    "LANES",
    "PRIME",
    "Boxes",
    "Table",
    "TensorSpec",
    "are_equal_in_field",
    "compute_weights",
    "concat_tables",
    "find_untiled",
    "fingerprint",
    "fingerprint_specs",
    "make_column",
    "make_matrix",
    "number_groups",
    "repeat_values",
    "sort_unique",
]
