"""Whether boxes fill a global tensor exactly: nothing twice, nothing left out, nothing outside."""

from __future__ import annotations

from bisect import bisect_left
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.planning.boxes import Box, Ints, intersect

if TYPE_CHECKING:
    from collections.abc import Sequence


class Overlap(NamedTuple):
    """Two boxes, by their numbers, and what both have."""

    first: int
    second: int
    common: Box


def find_overlap(boxes: Sequence[Box]) -> Overlap | None:
    """The first pair of boxes that share an element, or None; sweeps along the axis with the most distinct starts."""
    if not boxes or not boxes[0].shape:
        return Overlap(0, 1, boxes[0]) if len(boxes) > 1 else None
    axis = max(range(len(boxes[0].shape)), key=lambda a: len({box.offset[a] for box in boxes}))
    order = sorted((n for n, box in enumerate(boxes) if box.volume), key=lambda n: boxes[n].offset[axis])
    live: list[int] = []
    for number in order:
        box = boxes[number]
        live = [other for other in live if boxes[other].end[axis] > box.offset[axis]]
        for other in live:
            common = intersect(boxes[other], box)
            if common is not None:
                return Overlap(min(other, number), max(other, number), common)
        live.append(number)
    return None


def find_hole(shape: Ints, boxes: Sequence[Box]) -> Box | None:
    """A box of the global tensor that no given box reaches, or None if they cover it; boxes must not overlap."""
    if sum(box.volume for box in boxes) >= Box((), tuple(shape)).volume:
        return None
    cuts = [_cuts(size, axis, boxes) for axis, size in enumerate(shape)]
    filled = _filled_cells(cuts, boxes)
    for cell in product(*(range(len(points) - 1) for points in cuts)):
        if cell not in filled:
            lows = tuple(points[i] for points, i in zip(cuts, cell, strict=True))
            highs = tuple(points[i + 1] for points, i in zip(cuts, cell, strict=True))
            return Box(lows, tuple(hi - lo for lo, hi in zip(lows, highs, strict=True)))
    return None


def _cuts(size: int, axis: int, boxes: Sequence[Box]) -> list[int]:
    points = {0, size}
    for box in boxes:
        points.update((box.offset[axis], box.end[axis]))
    return sorted(points)


def _filled_cells(cuts: list[list[int]], boxes: Sequence[Box]) -> set[Ints]:
    """The cells, between neighbouring cuts, that the boxes fill."""
    cells: set[Ints] = set()
    for box in boxes:
        spans = (
            range(bisect_left(points, lo), bisect_left(points, hi))
            for points, lo, hi in zip(cuts, box.offset, box.end, strict=True)
        )
        cells.update(product(*spans))
    return cells


__all__ = ["Overlap", "find_hole", "find_overlap"]
