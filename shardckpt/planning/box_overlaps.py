"""Find the stored boxes that requested boxes share elements with: a join of two tables, exact matches first."""

from __future__ import annotations

from operator import add, sub
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.planning.table import FEW, Table, make_column, make_matrix, number_groups, sort_unique

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Pairs of boxes that are compared at a time, which bounds the memory that they take.
_PAIRS = 1 << 20
#: Pairs for each box, above which a search for the near boxes takes less time than the comparison of all.
_PAIRS_OF_BOX = 16


class Overlaps(NamedTuple):
    """Regions that a wanted and a stored box have in common, in columns.

    Attributes:
        wanted: int64 of shape (n,): the wanted box of each region, by its row.
        stored: int64 of shape (n,): the stored box of each region, by its row.
        offset: int64 of shape (n, axes): global offsets of the regions.
        extent: int64 of shape (n, axes): extents of the regions.
    """

    wanted: torch.Tensor
    stored: torch.Tensor
    offset: torch.Tensor
    extent: torch.Tensor


def find_overlaps(wanted: Table, stored: Table, bounds: torch.Tensor) -> Overlaps:
    """Return every region that a wanted box has in common with a stored one.

    Every element of a wanted box that is stored is in one of them. Tensors have the same numbers in both tables; stored
    boxes do not overlap each other, and are ordered by these numbers: rows ``bounds[n]`` to ``bounds[n + 1]`` belong to
    tensor ``n``. The bounds are int64 of shape (tensors + 1,).
    """
    axes = max(wanted.offset.shape[1], stored.offset.shape[1])
    wanted, stored = wanted.pad_axes(axes), stored.pad_axes(axes)
    if max(len(wanted.spec), len(stored.spec)) <= FEW:
        ends = bounds.tolist()
        pairs = [(row, other) for row, n in enumerate(wanted.spec.tolist()) for other in range(ends[n], ends[n + 1])]
        if len(pairs) <= FEW:
            return _compare_few(wanted, stored, pairs)
    first = bounds[wanted.spec]
    counts = bounds[wanted.spec + 1] - first
    if bool((counts == 1).all()):
        return _compare(wanted, torch.arange(len(counts), device="cpu"), stored, first)
    total = int(counts.sum())
    if total <= 2 * len(counts):  # hardly more pairs than boxes: a search for equal boxes would save nothing
        left, parts = torch.arange(len(counts), device="cpu"), []
    else:
        # most loads want boxes as they are stored: these need one lookup each, and not a comparison with every box
        rows = list_rows(sort_unique(wanted.spec), bounds)
        match = _match_equal(wanted, stored.rows(rows))
        found = match >= 0
        left, number = (~found).nonzero().view(-1), found.nonzero().view(-1)
        parts = [Overlaps(number, rows[match[number]], wanted.offset[number], wanted.extent[number])]
    if int(counts[left].sum()) > _PAIRS_OF_BOX * (len(left) + len(stored.spec)):
        parts.append(_compare_near(wanted, left, stored, bounds))
    else:
        parts += _compare_all(wanted, left, stored, first[left], counts[left])
    if len(parts) == 1:
        return parts[0]
    return Overlaps(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def list_rows(specs: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the rows, int64 of shape (rows,), of some tensors, one tensor after the other.

    ``specs`` are the numbers of the tensors, int64 of shape (n,).
    """
    if max(len(specs), len(bounds)) <= FEW and int(bounds[-1]) <= FEW:
        stops = bounds.tolist()
        return make_column([row for spec in specs.tolist() for row in range(stops[spec], stops[spec + 1])])
    first = bounds[specs]
    counts = bounds[specs + 1] - first
    ends = counts.cumsum(0)
    number = number_groups(ends)
    return torch.arange(len(number), device="cpu") + (first - ends + counts)[number]


def _compare_few(wanted: Table, stored: Table, pairs: list[tuple[int, int]]) -> Overlaps:
    """Return the overlaps of pairs of rows, as :func:`_compare` does, without a call of torch's for each step."""
    ours = list(zip(wanted.offset.tolist(), wanted.extent.tolist(), strict=True))
    theirs = list(zip(stored.offset.tolist(), stored.extent.tolist(), strict=True))
    found = []
    for row, other in pairs:
        (offset, extent), (offset_of_other, extent_of_other) = ours[row], theirs[other]
        low = tuple(map(max, offset, offset_of_other))
        high = map(min, map(add, offset, extent), map(add, offset_of_other, extent_of_other))
        size = tuple(map(sub, high, low))
        if min(size, default=1) > 0:
            found.append((row, other, low, size))
    rows, others, lows, sizes = zip(*found, strict=True) if found else ((), (), (), ())
    axes = wanted.offset.shape[1]
    return Overlaps(
        make_column([*rows]), make_column([*others]), make_matrix(lows, axes, 0), make_matrix(sizes, axes, 1)
    )


def _match_equal(wanted: Table, stored: Table) -> torch.Tensor:
    """Return the row of the stored box that equals each wanted one, else -1."""
    if not len(stored.spec):
        return torch.full_like(wanted.spec, -1)
    hashes, order = stored.hashes().sort()
    place = torch.searchsorted(hashes, wanted.hashes()).clamp(max=len(hashes) - 1)
    row = order[place]
    # of stored boxes with equal hashes only the first is compared; a box that this misses is found by _compare_all
    same = (stored.spec[row] == wanted.spec) & (stored.offset[row] == wanted.offset).all(1)
    return torch.where(same & (stored.extent[row] == wanted.extent).all(1), row, -1)


def _compare_near(wanted: Table, rows: torch.Tensor, stored: Table, bounds: torch.Tensor) -> Overlaps:
    """Return the overlaps of some rows of ``wanted`` with the stored boxes that are near along one axis.

    That is, for each tensor, the axis which its boxes cut most. Thousands of wanted and of stored boxes make millions
    of pairs, and few of these overlap.
    """
    near = list_rows(sort_unique(wanted.spec[rows]), bounds)
    boxes = stored.rows(near)
    ends = boxes.offset + boxes.extent
    tensors, axes = len(bounds) - 1, ends.shape[1]
    by_tensor = boxes.spec[:, None].expand(-1, axes)
    longest = boxes.offset.new_zeros(tensors, axes).scatter_reduce_(0, by_tensor, boxes.extent, "amax")
    size = boxes.offset.new_zeros(tensors, axes).scatter_reduce_(0, by_tensor, ends, "amax")
    axis = (longest / size.clamp(min=1)).argmin(1)
    starts, place = _along(boxes.offset, axis[boxes.spec]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
    keys, order = (boxes.spec * len(starts) + place).sort()
    # a box that starts further before the wanted one than the longest box is long ends before it
    spec, chosen = wanted.spec[rows], axis[wanted.spec[rows]]
    begin = _along(wanted.offset[rows], chosen)
    end = begin + _along(wanted.extent[rows], chosen)
    first = spec * len(starts) + torch.searchsorted(starts, begin - _along(longest[spec], chosen), right=True)
    last = spec * len(starts) + torch.searchsorted(starts, end)
    first, last = torch.searchsorted(keys, first), torch.searchsorted(keys, last)
    counts = (last - first).clamp(min=0)  # an empty box may have none
    parts = [*_compare_all(wanted, rows, boxes.rows(order), first, counts)]
    found = Overlaps(*(torch.cat(columns) for columns in zip(*parts, strict=True)))
    return found._replace(stored=near[order[found.stored]])


def _along(table: torch.Tensor, axis: torch.Tensor) -> torch.Tensor:
    """Return the value of each row of (rows, axes) at its own axis."""
    return table.gather(1, axis[:, None])[:, 0]


def _compare_all(
    wanted: Table, rows: torch.Tensor, stored: Table, first: torch.Tensor, counts: torch.Tensor
) -> Iterator[Overlaps]:
    """Yield the overlaps of some rows of ``wanted`` with all stored boxes of their tensors.

    The overlaps of ``rows[n]`` are the ``counts[n]`` rows of ``stored`` from ``first[n]`` on; all are int64 of the same
    shape.
    """
    ends = counts.cumsum(0)
    shift = first - ends + counts
    start = before = 0
    while start < len(rows):
        stop = len(rows)
        if int(ends[-1]) - before > _PAIRS:
            stop = max(start + 1, int(torch.searchsorted(ends, before + _PAIRS, right=True)))
        number = number_groups(ends[start:stop] - before)
        one = rows[start:stop][number]
        other = torch.arange(before, before + len(number), device="cpu") + shift[start:stop][number]
        yield _compare(wanted, one, stored, other)
        start, before = stop, before + len(number)


def _compare(wanted: Table, one: torch.Tensor, stored: Table, other: torch.Tensor) -> Overlaps:
    """Return the overlaps of pairs: rows of ``wanted``, and for each a row of ``stored``."""
    ours, theirs = wanted.offset[one], stored.offset[other]
    low = torch.maximum(ours, theirs)
    extent = torch.minimum(ours + wanted.extent[one], theirs + stored.extent[other]) - low
    hit = (extent > 0).all(1)
    if bool(hit.all()):
        return Overlaps(one, other, low, extent)
    return Overlaps(one[hit], other[hit], low[hit], extent[hit])
