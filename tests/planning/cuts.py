"""Random tensors cut into random boxes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import random

Ints = tuple[int, ...]


class CutTensor(NamedTuple):
    """A shape, and boxes (offset, extent) that fill it."""

    shape: Ints
    boxes: list[tuple[Ints, Ints]]


def random_cut(rng: random.Random, *, empty: bool = True) -> CutTensor:
    """A tensor of 0 to 4 axes, halved again and again at random places; some boxes may have no element."""
    shape = tuple(rng.randint(0 if empty and rng.random() < 0.1 else 1, 9) for _ in range(rng.randint(0, 4)))
    boxes: list[tuple[Ints, Ints]] = []
    _halve(rng, (0,) * len(shape), shape, boxes, depth=rng.randint(0, 4), empty=empty)
    rng.shuffle(boxes)
    return CutTensor(shape, boxes)


def _halve(
    rng: random.Random, offset: Ints, extent: Ints, boxes: list[tuple[Ints, Ints]], *, depth: int, empty: bool
) -> None:
    axis = rng.randrange(len(extent)) if extent else 0
    least = 0 if empty else 1
    if not depth or not extent or extent[axis] <= least:
        boxes.append((offset, extent))
        return
    cut = rng.randint(least, extent[axis] - least)
    after = (*offset[:axis], offset[axis] + cut, *offset[axis + 1 :])
    for corner, length in ((offset, cut), (after, extent[axis] - cut)):
        part = (*extent[:axis], length, *extent[axis + 1 :])
        _halve(rng, corner, part, boxes, depth=depth - 1, empty=empty)
