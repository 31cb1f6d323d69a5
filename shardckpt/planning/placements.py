"""Placements: the part of a tensor that a rank holds when mesh dimensions split the tensor one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from shardckpt.errors import ShardingError
from shardckpt.planning.boxes import Box, Ints

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

#: A range of indices along one axis: the first, and the one behind the last.
Run: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """One sharding step, as one mesh dimension makes it.

    Attributes:
        dim: Axis of the tensor that is split.
        count: Number of shards: the size of the mesh dimension.
        index: Number of this rank's shard: its coordinate in the mesh dimension.
        factor: 1 for ``Shard``, which splits as :func:`torch.chunk` does. Else the ``split_factor`` of
            ``_StridedShard``: the axis is split into ``factor`` blocks, each block into ``count`` shards, and the rank
            holds the shard with its number of every block.
    """

    dim: int
    count: int
    index: int
    factor: int = 1


class HeldBox(NamedTuple):
    """A box of the global tensor that is one block of the local tensor, and its offset there, along every axis."""

    box: Box
    place: Ints


def find_held_runs(shape: Sequence[int], splits: Iterable[Split]) -> tuple[tuple[Run, ...], ...]:
    """Return the global indices that a rank holds along every axis.

    Each step splits the part that the one before left, as DTensor's placements do from left to right. The ranges of an
    axis are ascending, in the order of the local tensor; adjacent ranges are merged, and an axis has none if the rank
    holds nothing of it. A step that splits an axis that the tensor lacks, or names a shard that does not exist, is a
    ShardingError.
    """
    held: list[list[Run]] = [[(0, size)] if size else [] for size in shape]
    for split in splits:
        _check(split, len(held))
        held[split.dim] = _merge(_split(held[split.dim], split))
    return tuple(map(tuple, held))


def compute_local_shape(shape: Sequence[int], splits: Iterable[Split]) -> Ints:
    """Return the shape of the rank's local tensor."""
    return tuple(map(_count, find_held_runs(shape, splits)))


def list_held_boxes(shape: Sequence[int], splits: Iterable[Split]) -> list[HeldBox]:
    """Return the boxes that a rank's local tensor consists of, in the order of its elements; none if it is empty."""
    axes = []
    for runs in find_held_runs(shape, splits):
        places = accumulate((stop - start for start, stop in runs), initial=0)  # where each run starts locally
        axes.append([(start, stop - start, place) for (start, stop), place in zip(runs, places, strict=False)])
    found = []
    for corner in product(*axes):
        start, extent, place = zip(*corner, strict=True) if corner else ((), (), ())
        found.append(HeldBox(Box(start, extent), place))
    return found


def make_empty_box(shape: Sequence[int], splits: Iterable[Split]) -> Box:
    """Return the box without elements that describes an empty local tensor; it lies inside the global shape."""
    held = find_held_runs(shape, splits)
    start = tuple(runs[0][0] if runs else size for runs, size in zip(held, shape, strict=True))
    return Box(start, tuple(map(_count, held)))


def _check(split: Split, axes: int) -> None:
    if not 0 <= split.dim < axes:
        raise ShardingError(f"{split} splits axis {split.dim} of a tensor of {axes} axes")
    if not 0 <= split.index < split.count or split.factor < 1:
        raise ShardingError(f"{split}: shard {split.index} of {split.count} with factor {split.factor} does not exist")


def _split(runs: Sequence[Run], split: Split) -> Iterator[Run]:
    """Yield the ranges that remain after a split, which counts the indices that the ranges hold, not global ones."""
    for block in range(split.factor):
        start, stop = _chunk((0, _count(runs)), split.factor, block)
        yield from _select(runs, _chunk((start, stop), split.count, split.index))


def _chunk(span: Run, count: int, index: int) -> Run:
    """Return a chunk of a range as torch.chunk cuts: full chunks first, the last ones short or empty."""
    start, stop = span
    step = -(-(stop - start) // count)  # rounded up
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def _select(runs: Iterable[Run], span: Run) -> Iterator[Run]:
    """Yield the parts of ranges between two positions in the sequence of their indices."""
    position = 0
    for start, stop in runs:
        first, last = (min(max(place - position, 0), stop - start) for place in span)
        if first < last:
            yield start + first, start + last
        position += stop - start


def _merge(runs: Iterable[Run]) -> list[Run]:
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return found


def _count(runs: Iterable[Run]) -> int:
    return sum(stop - start for start, stop in runs)
