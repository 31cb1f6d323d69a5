"""Ranges of files to read into memory, in batches of about equal size."""

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
        what: A name for the range in errors: a key.
    """

    file: str
    offset: int
    memory: memoryview
    what: str


def batch_ranges(
    ranges: Sequence[RangeRead],
    find_segments: Callable[[RangeRead], Segments | None],
    most: int,
    least: int,
    shares: int,
    *,
    joined: bool,
) -> Iterator[list[RangeRead]]:
    """Yield batches of ranges, in order, each for one thread: long ranges are cut, short ones joined if ``joined``.

    A range is cut only where a segment ends, so that no segment is read twice: ``find_segments`` returns the table of
    digests of its file, or None if they are not checked, and is called only for ranges that are cut. Empty ranges are
    left out.

    A batch has at most ``most`` bytes, more only if one segment is longer. Near the end it has less, the bytes that are
    left divided by ``shares``, but not less than ``least``: so all threads end at about the same time.
    """
    batch: list[RangeRead] = []
    left = sum(read.memory.nbytes for read in ranges)

    def size_batch() -> int:
        return max(least, min(most, left // shares))

    free = size_batch()
    for read in ranges:
        file, offset, memory, what = read
        nbytes, start = memory.nbytes, 0
        segments = find_segments(read) if nbytes > free else None
        while nbytes - start > free:
            stop = start + free
            if segments is not None:
                stop = min(segments.cut(offset + start, offset + stop) - offset, nbytes)
            yield [*batch, RangeRead(file, offset + start, memory[start:stop], what)]
            left -= stop - start
            batch, free, start = [], size_batch(), stop
        if start == nbytes:
            continue
        batch.append(RangeRead(file, offset + start, memory[start:], what))
        free -= nbytes - start
        left -= nbytes - start
        if free <= 0 or not joined:
            yield batch
            batch, free = [], size_batch()
    if batch:
        yield batch
