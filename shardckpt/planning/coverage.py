"""Check that boxes fill a global tensor exactly: find an overlap of two boxes, or a hole that no box fills."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.planning.boxes import Box, Ints, intersect
from shardckpt.planning.lookup import BoxFinder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class Overlap(NamedTuple):
    """Two boxes that overlap, by their numbers in the list, and the elements that both have; the second is larger."""

    first: int
    second: int
    common: Box


def find_overlap(boxes: Sequence[Box]) -> Overlap | None:
    """Return two boxes that have an element in common, or None if there are none."""
    filled = [number for number, box in enumerate(boxes) if box.volume]
    if len(filled) <= 1:
        return None
    if _is_grid([boxes[number] for number in filled]):  # as most tensors are cut: one lookup a box
        seen: dict[Ints, int] = {}
        for number in filled:
            first = seen.setdefault(boxes[number].offset, number)
            if first != number:
                return Overlap(first, number, boxes[number])
        return None
    return _find_overlap_by_sweep(boxes, filled)


def find_hole(shape: Ints, boxes: Sequence[Box]) -> Box | None:
    """Return a box of elements of a tensor that no box has, or None if the boxes fill it.

    The boxes are inside the shape, and do not overlap.
    """
    full = Box.from_shape(shape)
    if sum(box.volume for box in boxes) >= full.volume:  # enough, as none overlap
        return None
    filled = [box for box in boxes if box.volume]
    if filled and _is_grid([*filled, Box(tuple(shape), filled[0].shape)]):
        have, steps = {box.offset for box in filled}, filled[0].shape
        corners = product(*(range(0, size, step) for size, step in zip(shape, steps, strict=True)))
        return next((Box(corner, steps) for corner in corners if corner not in have), None)
    return find_uncovered(full, BoxFinder(filled))


def find_uncovered(wanted: Box, finder: BoxFinder) -> Box | None:
    """Return a box of elements of the wanted box that no box of the finder has, or None; its boxes may overlap."""
    left = [wanted]  # the rest to search; each hit leaves at most two parts per axis of it
    while left:
        part = left.pop()
        hit = next(finder.touching(part), None)
        if hit is None:
            return part
        left.extend(_subtract(part, hit[1]))
    return None


def _is_grid(boxes: Sequence[Box]) -> bool:
    """Return whether all boxes are cells of one regular grid; then only equal boxes overlap, which is cheap to find."""
    shape = boxes[0].shape
    return all(
        box.shape == shape and not any(off % size for off, size in zip(box.offset, shape, strict=True)) for box in boxes
    )


def _find_overlap_by_sweep(boxes: Sequence[Box], filled: Sequence[int]) -> Overlap | None:
    """Compare each box with the boxes that contain its start along one axis: the one with the most different starts."""
    axis = max(range(len(boxes[0].shape)), key=lambda a: len({boxes[number].offset[a] for number in filled}))
    live: list[int] = []
    for number in sorted(filled, key=lambda n: boxes[n].offset[axis]):
        box = boxes[number]
        # boxes that end before this one starts cannot overlap it, nor any that follows
        live = [other for other in live if boxes[other].end[axis] > box.offset[axis]]
        for other in live:
            common = intersect(boxes[other], box)
            if common is not None:
                return Overlap(min(other, number), max(other, number), common)
        live.append(number)
    return None


def _subtract(part: Box, taken: Box) -> Iterator[Box]:
    """Yield boxes that fill ``part`` except for ``taken``, which lies inside it: at most two per axis."""
    low, size = list(part.offset), list(part.shape)
    for axis in range(len(size)):
        before = taken.offset[axis] - low[axis]
        after = low[axis] + size[axis] - taken.end[axis]
        if before:
            yield Box(tuple(low), (*size[:axis], before, *size[axis + 1 :]))
        if after:
            yield Box((*low[:axis], taken.end[axis], *low[axis + 1 :]), (*size[:axis], after, *size[axis + 1 :]))
        low[axis], size[axis] = taken.offset[axis], taken.shape[axis]
