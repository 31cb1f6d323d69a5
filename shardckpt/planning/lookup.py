"""Finding the stored boxes that a wanted box needs, without looking at all of them."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from shardckpt.planning.boxes import Box, intersect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class BoxFinder:
    """Boxes of one tensor, ordered along the axis that tells them apart best.

    Args:
        boxes: Boxes of equal dimension that do not overlap.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._exact = {box: number for number, box in enumerate(boxes)}
        axes = range(len(boxes[0].shape)) if boxes else range(0)
        self._axis = max(axes, key=lambda axis: len({box.offset[axis] for box in boxes}), default=None)
        if self._axis is None:
            return
        axis = self._axis
        self._order = sorted(range(len(boxes)), key=lambda number: boxes[number].offset[axis])
        self._starts = [boxes[number].offset[axis] for number in self._order]
        self._longest = max(box.shape[axis] for box in boxes)

    def box(self, number: int) -> Box:
        """One of the boxes."""
        return self._boxes[number]

    def touching(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """(number, common box) of the boxes that share elements with the wanted one."""
        exact = self._exact.get(wanted)
        if exact is not None:
            yield exact, wanted
            return
        if self._axis is None:
            return
        first = bisect_left(self._starts, wanted.offset[self._axis] - self._longest + 1)
        last = bisect_left(self._starts, wanted.end[self._axis])
        for number in self._order[first:last]:
            common = intersect(self._boxes[number], wanted)
            if common is not None:
                yield number, common


__all__ = ["BoxFinder"]
