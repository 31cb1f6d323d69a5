"""Which stored boxes wanted ones share elements with: joined by arithmetic on columns, exact matches first."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.planning.table import Table, number_groups, sort_unique

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Pairs of boxes that are looked at together.
_PAIRS = 1 << 20


class Overlaps(NamedTuple):
    """Regions that a wanted and a stored box share, in columns.

    Attributes:
        wanted: int64 of shape (n,): rows of the wanted boxes.
        stored: int64 of shape (n,): rows of the stored boxes.
        offset: int64 of shape (n, axes): of the common regions, global.
        extent: int64 of shape (n, axes): of the common regions.
    """

    wanted: torch.Tensor
    stored: torch.Tensor
    offset: torch.Tensor
    extent: torch.Tensor


def find_overlaps(wanted: Table, stored: Table, bounds: torch.Tensor) -> Overlaps:
    """Every region that a wanted box shares with a stored one.

    Args:
        wanted: Boxes of the wholes that ``stored`` numbers.
        stored: Boxes that do not overlap each other, by ascending number of their whole.
        bounds: Rows ``bounds[n]`` to ``bounds[n + 1]`` of ``stored`` are those of whole ``n``.
    """
    axes = max(wanted.offset.shape[1], stored.offset.shape[1])
    wanted, stored = wanted.pad_axes(axes), stored.pad_axes(axes)
    first = bounds[wanted.spec]
    counts = bounds[wanted.spec + 1] - first
    ends = counts.cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    if total <= 2 * len(ends):  # hardly more chunks than wanted boxes: there is nothing to look up
        left, parts = torch.arange(len(ends), device="cpu"), []
    else:
        rows = list_rows(sort_unique(wanted.spec), bounds)
        match = _exact(wanted, stored.rows(rows))
        found = match >= 0
        left, number = (~found).nonzero().view(-1), found.nonzero().view(-1)
        parts = [Overlaps(number, rows[match[number]], wanted.offset[number], wanted.extent[number])]
    parts += _joined(wanted, left, stored, first[left], counts[left])
    if not parts:
        return Overlaps(left, left, wanted.offset, wanted.extent)
    if len(parts) == 1:
        return parts[0]
    return Overlaps(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def list_rows(specs: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The rows of some wholes, one after the other."""
    first = bounds[specs]
    counts = bounds[specs + 1] - first
    ends = counts.cumsum(0)
    number = number_groups(ends)
    return torch.arange(len(number), device="cpu") + (first - ends + counts)[number]


def _exact(wanted: Table, stored: Table) -> torch.Tensor:
    """The row of the stored box that equals each wanted one; -1 for none."""
    if not len(stored.spec):
        return torch.full_like(wanted.spec, -1)
    hashes, order = stored.hashes().sort()
    place = torch.searchsorted(hashes, wanted.hashes()).clamp(max=len(hashes) - 1)
    row = order[place]
    same = (stored.spec[row] == wanted.spec) & (stored.offset[row] == wanted.offset).all(1)
    return torch.where(same & (stored.extent[row] == wanted.extent).all(1), row, -1)


def _joined(
    wanted: Table, rows: torch.Tensor, stored: Table, first: torch.Tensor, counts: torch.Tensor
) -> Iterator[Overlaps]:
    """The overlaps of some wanted boxes with all stored ones of their wholes.

    Args:
        wanted: Boxes.
        rows: Which of them.
        stored: Boxes.
        first: The first stored one of each row's whole.
        counts: How many stored ones that has.
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
        ours, theirs = wanted.offset[one], stored.offset[other]
        low = torch.maximum(ours, theirs)
        extent = torch.minimum(ours + wanted.extent[one], theirs + stored.extent[other]) - low
        hit = (extent > 0).all(1).nonzero().view(-1)
        yield Overlaps(one[hit], other[hit], low[hit], extent[hit])
        start, before = stop, before + len(number)


__all__ = ["Overlaps", "find_overlaps", "list_rows"]
