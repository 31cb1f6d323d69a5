"""Find the boxes that overlap a given one, without a comparison with every box."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from shardckpt.planning.boxes import Box, intersect

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class BoxFinder:
    """Boxes of one tensor, ordered along the axis with the most different offsets.

    Args:
        boxes: Boxes with the same number of axes. If they may overlap, see :meth:`touching`.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._exact = {box: number for number, box in enumerate(boxes)}
        # most different offsets: then the fewest boxes share a range with a wanted one
        axes = range(len(boxes[0].shape)) if boxes else range(0)
        self._axis = max(axes, key=lambda axis: len({box.offset[axis] for box in boxes}), default=None)
        if self._axis is None:
            return
        axis = self._axis
        self._order = sorted(range(len(boxes)), key=lambda number: boxes[number].offset[axis])
        self._starts = [boxes[number].offset[axis] for number in self._order]
        self._longest = max(box.shape[axis] for box in boxes)

    def box(self, number: int) -> Box:
        """Return the box with this number, its index in the list that was given."""
        return self._boxes[number]

    def touching(self, wanted: Box) -> Iterator[tuple[int, Box]]:
        """Yield the boxes that have elements in common with the wanted one.

        If one of the boxes equals the wanted one, only that is yielded: it has all its elements.

        Yields:
            The number of a box, and the box of the common elements.
        """
        exact = self._exact.get(wanted)
        if exact is not None:
            yield exact, wanted
            return
        if self._axis is None:
            return
        # a box that starts further than the longest box before the wanted one ends before it
        first = bisect_left(self._starts, wanted.offset[self._axis] - self._longest + 1)
        last = bisect_left(self._starts, wanted.end[self._axis])
        for number in self._order[first:last]:
            common = intersect(self._boxes[number], wanted)
            if common is not None:
                yield number, common
