"""Placements: what a rank holds of a tensor that mesh dimensions split one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shardckpt.errors import ShardingError
from shardckpt.planning.boxes import Box, Ints

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: Indices along one axis, from the first to behind the last.
Run: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """One sharding step, as one mesh dimension makes it.

    Attributes:
        dim: Axis of the tensor that is cut.
        count: Number of shards: the size of the mesh dimension.
        index: Which of them: this rank's coordinate.
        factor: 1 for ``Shard``, as :func:`torch.chunk` cuts. Else the ``split_factor`` of ``_StridedShard``: the axis
            is cut into so many blocks, each of them into ``count``, and the rank holds the same part of every block.
    """

    dim: int
    count: int
    index: int
    factor: int = 1


class HeldBox(NamedTuple):
    """A box of the global tensor that lies as one block in the local tensor.

    Attributes:
        box: Where it lies in the global tensor.
        place: Its offset in the local tensor.
    """

    box: Box
    place: Ints


def find_held_runs(shape: Sequence[int], splits: Iterable[Split]) -> tuple[tuple[Run, ...], ...]:
    """The global indices that a rank holds along every axis, as runs in the order of the local tensor.

    The steps cut one after the other, each what the one before left, as DTensor's placements do from left to right.
    Runs ascend, and neighbours are merged; an axis of which nothing is held has none.

    Raises:
        ShardingError: a step cuts an axis that the tensor lacks, or names a shard that does not exist.
    """
    held: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
    for split in splits:
        _check(split, len(held))
        held[split.dim] = _merged(_cut(held[split.dim], split))
    return tuple(map(tuple, held))


def compute_local_shape(shape: Sequence[int], splits: Iterable[Split]) -> Ints:
    """The shape of the rank's local tensor."""
    return tuple(map(_length, find_held_runs(shape, splits)))


def list_held_boxes(shape: Sequence[int], splits: Iterable[Split]) -> list[HeldBox]:
    """The boxes that a rank's local tensor consists of, in the order of its elements; none for an empty one."""
    axes = [list(_placed(runs)) for runs in find_held_runs(shape, splits)]
    found = []
    for corner in product(*axes):
        start = tuple(run[0] for run, _ in corner)
        extent = tuple(run[1] - run[0] for run, _ in corner)
        found.append(HeldBox(Box(start, extent), tuple(place for _, place in corner)))
    return found


def make_empty_box(shape: Sequence[int], splits: Iterable[Split]) -> Box:
    """The box without elements that stands for an empty local tensor; it lies inside the global shape."""
    held = find_held_runs(shape, splits)
    start = tuple(runs[0][0] if runs else size for runs, size in zip(held, shape, strict=True))
    return Box(start, tuple(map(_length, held)))


def _check(split: Split, axes: int) -> None:
    if not 0 <= split.dim < axes:
        raise ShardingError(f"{split} cuts axis {split.dim} of a tensor of {axes} axes")
    if not 0 <= split.index < split.count or split.factor < 1:
        raise ShardingError(f"{split}: shard {split.index} of {split.count} with factor {split.factor} does not exist")


def _cut(runs: Sequence[Run], split: Split) -> Iterator[Run]:
    """The runs that remain; positions count the elements that the runs hold, not global indices."""
    for block in range(split.factor):
        start, stop = _chunk((0, _length(runs)), split.factor, block)
        yield from _between(runs, _chunk((start, stop), split.count, split.index))


def _chunk(span: Run, count: int, index: int) -> Run:
    """The given chunk of a span, as torch.chunk cuts: full chunks first, the last ones short or empty."""
    start, stop = span
    step = -(-(stop - start) // count)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def _between(runs: Iterable[Run], span: Run) -> Iterator[Run]:
    """The part of the runs between two positions."""
    position = 0
    for start, stop in runs:
        first, last = (min(max(place - position, 0), stop - start) for place in span)
        if first < last:
            yield start + first, start + last
        position += stop - start


def _merged(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _placed(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """Every run with the local index at which it starts."""
    ends = accumulate((stop - start for start, stop in runs), initial=0)
    return zip(runs, ends, strict=False)


def _length(runs: Iterable[Run]) -> int:
    return sum(stop - start for start, stop in runs)


__all__ = ["HeldBox", "Run", "Split", "compute_local_shape", "find_held_runs", "list_held_boxes", "make_empty_box"]
