"""Boxes of many tensors in columns, one row per box: a million of them are compared by a few tensor operations."""

from __future__ import annotations

import functools
import hashlib
import math
from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning.boxes import Ints

#: Order of a prime field. It is below 2^31, so that the product of two elements fits into an int64.
PRIME = (1 << 31) - 1
#: Independent sums that are compared. One alone misses an error once in 2^31 / axes; both do once in the square.
LANES = 2
_LARGEST = (1 << 63) - 1
#: Boxes whose products are computed at a time: few enough for the cache of a core.
_ROWS = 1 << 14
#: Values of a column that are few: Python does so many in the time of two calls of torch's, and a slice of some tensors
#: needs a hundred of such calls before it reads.
FEW = 64
#: Shifts and factors of splitmix64, and its increment, as signed 64-bit integers.
_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))
_STEP = -0x61C8864680B583EB


class TensorSpec(NamedTuple):
    """A global tensor or object: all that the ranks that have shards of it must agree on.

    Attributes:
        kind: ``"tensor"`` or ``"object"``.
        key: Its name.
        dtype: Its dtype as text; ``"None"`` for an object.
        shape: Its global shape.
    """

    kind: str
    key: str
    dtype: str
    shape: Ints


@dataclass
class Boxes:
    """A :class:`Table` under construction, in lists: each box's number of its tensor, global offset and extent."""

    spec: list[int] = field(default_factory=list)
    offsets: list[Ints] = field(default_factory=list)
    extents: list[Ints] = field(default_factory=list)

    def add(self, spec: int, offset: Ints, extent: Ints) -> None:
        """Add a box of the tensor with number ``spec``."""
        self.spec.append(spec)
        self.offsets.append(offset)
        self.extents.append(extent)

    def table(self) -> Table:
        """Return the boxes in columns, with as many axes as the widest has."""
        axes = max(map(len, self.offsets), default=0)
        return Table(make_column(self.spec), make_matrix(self.offsets, axes, 0), make_matrix(self.extents, axes, 1))


class Table(NamedTuple):
    """Boxes in columns.

    Attributes:
        spec: int64 of shape (n,): the number of each box's tensor in a list of :class:`TensorSpec` or the like.
        offset: int64 of shape (n, axes): global offsets; 0 along axes that a tensor does not have.
        extent: int64 of shape (n, axes): extents; 1 along axes that a tensor does not have.
    """

    spec: torch.Tensor
    offset: torch.Tensor
    extent: torch.Tensor

    def volume(self) -> torch.Tensor:
        """Return the number of elements of every box: int64 of shape (n,)."""
        return count_volumes(self.extent)

    def rows(self, which: torch.Tensor | slice) -> Table:
        """Return some of the boxes, by row numbers, a mask or a slice."""
        return Table(self.spec[which], self.offset[which], self.extent[which])

    def pad_axes(self, axes: int) -> Table:
        """Return the same boxes with at least ``axes`` axes."""
        return Table(self.spec, _pad_column(self.offset, axes, 0), _pad_column(self.extent, axes, 1))

    def first_axes(self, axes: int) -> Table:
        """Return the same boxes without the axes from number ``axes`` on."""
        return Table(self.spec, self.offset[:, :axes], self.extent[:, :axes])

    def hashes(self) -> torch.Tensor:
        """Return a hash of every row, int64 of shape (n,). Rows with equal hashes must still be compared."""
        found = _mix(self.spec)
        for axis in range(self.offset.shape[1]):
            found = _mix(found + _mix(self.offset[:, axis]) * 3 + _mix(self.extent[:, axis] + axis))
        return found


def concat_tables(tables: list[Table]) -> Table:
    """Return the rows of all tables in one, with as many axes as the widest has."""
    axes = max((table.offset.shape[1] for table in tables), default=0)
    wide = [table.pad_axes(axes) for table in tables]
    return Table(
        torch.cat([table.spec for table in wide]),
        torch.cat([table.offset for table in wide]),
        torch.cat([table.extent for table in wide]),
    )


def make_column(values: list[int]) -> torch.Tensor:
    """Return the values as an int64 tensor of shape (n,) on the CPU."""
    return torch.frombuffer(array("q", values), dtype=torch.int64) if values else _empty(0)


def sort_unique(column: torch.Tensor) -> torch.Tensor:
    """Return the different values of a column, ascending."""
    if len(column) <= FEW:
        return make_column(sorted(set(column.tolist())))
    return column.unique()  # type: ignore[no-untyped-call,no-any-return]


def repeat_values(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return each value as often as its count says, in their order."""
    return values[number_groups(counts.cumsum(0))]


def make_bounds(counts: torch.Tensor) -> torch.Tensor:
    """Return where each group of rows begins, and where the last one ends: ``[0, 2, 5]`` for the counts ``[2, 3]``."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def number_groups(ends: torch.Tensor) -> torch.Tensor:
    """Return the number of the group that each row belongs to: ``[0, 0, 1, 2, 2]`` for the ends ``[2, 3, 5]``.

    ``ends`` has the row behind the last one of each group, ascending. Both are int64, of shape (groups,) and (rows,).
    """
    # not repeat_interleave: it starts torch's threads even for a handful of rows
    total = int(ends[-1]) if len(ends) else 0
    if max(total, len(ends)) <= FEW:
        stops = ends.tolist()
        return make_column([bisect_right(stops, row) for row in range(total)])
    return torch.bincount(ends[:-1], minlength=total + 1)[:total].cumsum(0)


def count_volumes(extents: torch.Tensor) -> torch.Tensor:
    """Return the number of elements of boxes, int64 of shape (n,), by their extents, int64 of shape (n, axes)."""
    if len(extents) <= FEW and extents.shape[1]:
        volumes = list(map(math.prod, extents.tolist()))
        if all(-_LARGEST <= volume <= _LARGEST for volume in volumes):  # an index may claim more: it wraps
            return make_column(volumes)
    return extents.prod(1)


def make_matrix(rows: Sequence[Ints], axes: int, filler: int) -> torch.Tensor:
    """Return rows of at most ``axes`` values as int64 of shape (rows, axes); shorter rows end with the filler."""
    if not rows or not axes:
        return _empty(len(rows), axes)
    if min(map(len, rows)) != axes:
        fillers = [(filler,) * (axes - count) for count in range(axes + 1)]
        rows = [(*row, *fillers[len(row)]) for row in rows]
    return torch.frombuffer(array("q", chain.from_iterable(rows)), dtype=torch.int64).view(-1, axes)


def compute_weights(specs: list[TensorSpec]) -> torch.Tensor:
    """Return a pseudorandom element of the field, not 0, for every tensor and lane; the same on every rank.

    It is a hash of each spec: int64 of shape (n, LANES).
    """
    texts = (f"{kind}\0{key}\0{dtype}\0{shape}" for kind, key, dtype, shape in specs)
    digests = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest() for text in texts]
    if not digests:
        return _empty(0, LANES)
    words = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int32).view(-1, LANES)
    return 1 + (words.to(torch.int64) & PRIME) % (PRIME - 1)


def fingerprint(table: Table, weights: torch.Tensor) -> list[int]:
    """Return sums that equal :func:`fingerprint_specs` if the boxes fill their tensors exactly: one per lane.

    If they do not, the sums are equal with odds of 1 in 10^16. A box is the product over its axes of (end - start).
    With every coordinate replaced by a random element of a prime field, the products of boxes add up to the product of
    the global tensor only where all inner faces cancel: nothing is missing, nothing is there twice (Schwartz-Zippel).
    The sums of ranks add up as those of rows do, so no rank needs the boxes of another. It finds mistakes, not malice:
    an attacker who knows the elements could construct boxes that pass. The weights are the tensors' own, by
    :func:`compute_weights`.
    """
    return ((_products(table) * weights[table.spec] % PRIME).sum(0) % PRIME).tolist()


def are_full(table: Table, extents: torch.Tensor) -> bool:
    """Return whether there is one box per tensor, in their order, and each fills its tensor.

    ``extents`` are the global shapes, int64 of shape (tensors, axes), with 1 along axes that a tensor lacks.
    """
    if len(extents) <= FEW:
        return (
            table.extent.shape == extents.shape
            and table.extent.tolist() == extents.tolist()
            and table.spec.tolist() == [*range(len(extents))]
            and not any(map(any, table.offset.tolist()))
        )
    return (
        torch.equal(table.extent, extents)
        and torch.equal(table.spec, torch.arange(len(extents), device="cpu"))
        and not bool(table.offset.any())
    )


def find_untiled(table: Table, shapes: list[Ints]) -> list[int]:
    """Find the tensors that their boxes do not fill exactly, with the odds of :func:`fingerprint`.

    Returns their numbers, ascending.
    """
    full = _full_boxes(shapes)
    if are_full(table, full.extent):  # most tensors have one box
        return []
    sums = torch.zeros(len(shapes), LANES, dtype=torch.int64, device="cpu")
    sums.index_add_(0, table.spec, _products(table))
    wrong = sums % PRIME != _products(full)
    return wrong.any(1).nonzero().view(-1).tolist()


def fingerprint_specs(specs: list[TensorSpec], weights: torch.Tensor) -> list[int]:
    """Return the :func:`fingerprint` of boxes that fill all tensors exactly."""
    return fingerprint(_full_boxes([spec.shape for spec in specs]), weights)


def fingerprint_each(specs: list[TensorSpec], weights: torch.Tensor) -> torch.Tensor:
    """Return the addend of each tensor in :func:`fingerprint_specs`: int64 of shape (n, LANES)."""
    return _products(_full_boxes([spec.shape for spec in specs])) * weights % PRIME


def are_equal_in_field(found: list[int], wanted: list[int]) -> bool:
    """Return whether two fingerprints, or sums of some, are equal modulo :data:`PRIME`."""
    return all((one - other) % PRIME == 0 for one, other in zip(found, wanted, strict=True))


def _pad_column(column: torch.Tensor, axes: int, filler: int) -> torch.Tensor:
    more = axes - column.shape[1]
    return torch.cat([column, column.new_full((len(column), more), filler)], 1) if more > 0 else column


def _full_boxes(shapes: list[Ints]) -> Table:
    """Return one box per tensor, which fills it."""
    extent = make_matrix(shapes, max(map(len, shapes), default=0), 1)
    return Table(torch.arange(len(shapes), device="cpu"), torch.zeros_like(extent), extent)


def _products(table: Table) -> torch.Tensor:
    """Return the products of all boxes in the field, of shape (n, LANES); an axis from 0 to 1 counts as 1."""
    axes = table.offset.shape[1]
    salts, scales = _face_constants(axes)
    found = torch.ones(len(table.spec), LANES, dtype=torch.int64, device="cpu")
    for first in range(0, len(found), _ROWS):
        rows = slice(first, first + _ROWS)
        low, high = table.offset[rows, :, None], (table.offset[rows] + table.extent[rows])[:, :, None]
        faces = (_elements(high, salts) - _elements(low, salts)) % PRIME * scales % PRIME
        for axis in range(axes):
            found[rows] = found[rows] * faces[:, axis] % PRIME
    return found


@functools.cache
def _face_constants(axes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return salts for coordinates, and factors by which a face from 0 to 1 counts as 1: of shape (axes, LANES)."""
    salts = _mix(torch.arange(axes, device="cpu")[:, None] + 1000 * torch.arange(LANES, device="cpu"))
    start, end = (_elements(torch.tensor(place, device="cpu"), salts) for place in (0, 1))
    scales = [[pow(face, -1, PRIME) for face in row] for row in (end - start).tolist()]
    return salts, torch.tensor(scales, dtype=torch.int64, device="cpu").view(axes, LANES)


def _elements(values: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
    """Return a pseudorandom element of the field for every value and salt."""
    return (_mix(values ^ salts) & ((1 << 62) - 1)) % PRIME


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Apply the finalizer of splitmix64 (https://prng.di.unimi.it/splitmix64.c), in wrapping int64."""
    found = values * _STEP + _STEP
    for shift, factor in _MIX:
        found = (found ^ ((found >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return found


def _empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int64, device="cpu")
