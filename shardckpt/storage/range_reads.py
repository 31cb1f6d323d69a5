"""Ranges of files to read into memory, cut and joined to batches of about equal size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.storage.digest import Segments


class RangeRead(NamedTuple):
    """A range of a file, and the memory that it is read into.

    Attributes:
        file: Name of the file.
        offset: Of the first byte in the file.
        memory: Writable bytes; filled completely.
        what: A key, named in errors.
    """

    file: str
    offset: int
    memory: memoryview
    what: str


def batch_ranges(
    ranges: Sequence[RangeRead],
    segments_of: Callable[[RangeRead], Segments | None],
    most: int,
    least: int,
    shares: int,
    *,
    joined: bool,
) -> Iterator[list[RangeRead]]:
    """Cut long ranges and join short ones to batches, each read by one thread; iterate over the batches in order.

    Ranges are cut where segments end, so that no segment is read twice; ``segments_of`` returns the table of digests of
    a range's file, if they are checked, and is called for ranges that are cut. Empty ranges are left out. A batch has
    several ranges only if ``joined`` is True.

    A batch has at most ``most`` bytes (more where a segment is longer), and at most the bytes that are left, divided by
    ``shares``, but may always have ``least``: the last batches are small, so that all threads end at about the same
    time.
    """
    batch: list[RangeRead] = []
    left = sum(found.memory.nbytes for found in ranges)
    free = max(least, min(most, left // shares))
    for found in ranges:
        name, offset, memory, what = found
        first = 0
        segments = segments_of(found) if memory.nbytes > free else None
        while memory.nbytes - first > free:
            stop = first + free
            if segments is not None:
                stop = min(segments.cut(offset + first, offset + stop) - offset, memory.nbytes)
            batch.append(RangeRead(name, offset + first, memory[first:stop], what))
            yield batch
            left -= stop - first
            batch, free, first = [], max(least, min(most, left // shares)), stop
        if first == memory.nbytes:
            continue
        batch.append(RangeRead(name, offset + first, memory[first:], what))
        free -= memory.nbytes - first
        left -= memory.nbytes - first
        if free <= 0 or not joined:
            yield batch
            batch, free = [], max(least, min(most, left // shares))
    if batch:
        yield batch
