"""Layouts of global tensors, drawn by hypothesis: which rank holds which shard, and how it lies in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from shardckpt.testing.memory import MEMORY_LAYOUTS, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

Ints = tuple[int, ...]
Layout = tuple["ShardSpec", ...]

MOST_CELLS = 12


@dataclass(frozen=True)
class ShardSpec:
    """A shard that a rank holds of a global tensor: the arguments of a ShardedTensor.

    Attributes:
        offset: Its first element.
        shape: Its extent along every axis of the global tensor.
        lead: Number of prepended axes, which its local tensor lacks.
        grid: Number of cells along each axis, or None for an irregular cut.
        flat: Start and stop in the flattened cell, or None for all of it.
        rank: Who holds it.
        replica: Its replica_id.
        memory: How its data lies in memory: a name of ``MEMORY_LAYOUTS``.
        thin: On save, whether ``data`` is an expanded view, where the values allow it; on load, whether it is None.
    """

    offset: Ints
    shape: Ints
    lead: int = 0
    grid: Ints | None = None
    flat: tuple[int, int] | None = None
    rank: int = 0
    replica: int | Ints = 0
    memory: str = "contiguous"
    thin: bool = False

    def __repr__(self) -> str:
        given = [(field.name, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{name}={value!r}" for name, value in given if value != getattr(ShardSpec, name, ...)]
        return f"ShardSpec({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, _: bool) -> None:
        printer.text(repr(self))

    @property
    def local_shape(self) -> Ints:
        """Its shape without the prepended axes."""
        return self.shape[self.lead :]

    @property
    def size(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape) if self.flat is None else self.flat[1] - self.flat[0]

    @property
    def is_main(self) -> bool:
        """Whether it is the copy that is written."""
        return self.replica in (0, (0, 0))

    def slice_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return its elements of a global tensor, in the shape that ``data`` has."""
        spans = tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))
        block = plain(tensor)[spans].reshape(self.local_shape)
        return (block if self.flat is None else block.reshape(-1)[slice(*self.flat)]).view(tensor.dtype)


@st.composite
def layouts(draw: st.DrawFn, shape: Ints, world: int) -> Layout:
    """Draw a partition of a global tensor into shards, some with replicas on other ranks.

    Args:
        draw: By hypothesis.
        shape: Of the global tensor.
        world: Number of ranks.

    Returns:
        A shard for each replica, with the rank that holds it: regular grids, cuts at any place, prepended axes,
        flattened shards, empty shards.
    """
    lead = draw(st.sampled_from([n for n in range(len(shape) + 1) if 0 < math.prod(shape[:n]) <= MOST_CELLS] or [0]))
    cut = draw(st.sampled_from((_grid, _grid, _irregular)))
    cells = draw(cut(shape, lead))
    if draw(st.integers(0, 3)) == 3:
        cells = [part for cell in cells for part in draw(_flattened(cell))]
    return tuple(copy for cell in cells for copy in draw(_held(cell, world)))


@st.composite
def regions(draw: st.DrawFn, shape: Ints, world: int) -> Layout:
    """Draw boxes to load that need not fit together: some overlap, and most elements are in none."""
    boxes = draw(st.lists(boxes_in(shape), max_size=4))
    return tuple(copy for offset, size in boxes for copy in draw(_held(ShardSpec(offset, size), world)))


@st.composite
def boxes_in(draw: st.DrawFn, shape: Ints) -> tuple[Ints, Ints]:
    """Offset and extent of a box, which may be empty."""
    spans = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans)


@st.composite
def _grid(draw: st.DrawFn, shape: Ints, lead: int) -> list[ShardSpec]:
    """The cells of a regular grid; one element along the leading axes that the local tensors lack."""
    counts = list(shape[:lead])
    for size in shape[lead:]:
        room = MOST_CELLS // max(math.prod(counts), 1)
        counts.append(draw(st.sampled_from([n for n in range(1, max(room, 1) + 1) if size % n == 0])))
    steps = tuple(size // count for size, count in zip(shape, counts, strict=True))
    return [
        ShardSpec(tuple(i * step for i, step in zip(cell, steps, strict=True)), steps, lead, tuple(counts))
        for cell in product(*map(range, counts))
    ]


@st.composite
def _irregular(draw: st.DrawFn, shape: Ints, lead: int) -> list[ShardSpec]:
    """Every index of the leading axes is cut in its own way, again and again, at any place."""
    cells = []
    for index in product(*map(range, shape[:lead])):
        whole = ShardSpec((*index, *(0,) * (len(shape) - lead)), (*(1,) * lead, *shape[lead:]), lead)
        cuts = draw(st.integers(0, max(4 - lead, 1)))
        cells.extend(draw(_bisected(whole, cuts)))
    return cells


@st.composite
def _bisected(draw: st.DrawFn, whole: ShardSpec, cuts: int) -> list[ShardSpec]:
    parts = [whole]
    for _ in range(cuts if len(whole.shape) > whole.lead else 0):
        part = parts.pop(draw(st.integers(0, len(parts) - 1)))
        axis = draw(st.integers(part.lead, len(part.shape) - 1))
        parts.extend(_halves(part, axis, draw(st.integers(0, part.shape[axis]))))
    return parts


def _halves(part: ShardSpec, axis: int, at: int) -> Iterator[ShardSpec]:
    for start, size in ((0, at), (at, part.shape[axis] - at)):
        offset, shape = list(part.offset), list(part.shape)
        offset[axis] += start
        shape[axis] = size
        yield replace(part, offset=tuple(offset), shape=tuple(shape))


@st.composite
def _flattened(draw: st.DrawFn, cell: ShardSpec) -> list[ShardSpec]:
    """Slices of the flattened cell, as distributed optimizers have them."""
    size = math.prod(cell.shape)
    edges = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
    return [replace(cell, flat=(start, stop)) for start, stop in pairwise(edges)]


@st.composite
def _held(draw: st.DrawFn, cell: ShardSpec, world: int) -> list[ShardSpec]:
    """A cell and its copies, each on a rank and in some way in memory; the first is the main replica."""
    copies = draw(st.sampled_from((1, 1, 1, 2, 3)))
    as_tuple = draw(st.booleans()) if copies > 1 else False
    return [
        replace(
            cell,
            replica=(0, number) if as_tuple else number,
            rank=draw(st.integers(0, world - 1)),
            memory=draw(st.sampled_from(tuple(MEMORY_LAYOUTS))),
            thin=draw(st.integers(0, 3)) == 3,
        )
        for number in range(copies)
    ]
