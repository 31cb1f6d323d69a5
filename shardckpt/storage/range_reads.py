"""Ranges of files to read into memory, in batches of about equal size."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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


def fill_gaps(
    parts: Sequence[tuple[int, memoryview]], start: int, stop: int, spare: memoryview
) -> list[memoryview] | None:
    """Return memory for all bytes of a range, piece by piece: its parts, and spare memory for the bytes between them.

    ``parts`` are offsets and memory, in ascending order; None if two overlap. ``spare`` has as many bytes as the range.
    """
    pieces: list[memoryview] = []
    end = start
    for offset, memory in (*parts, (stop, spare[:0])):
        if offset > end:
            pieces.append(spare[end - start : offset - start])
        elif offset < end:
            return None
        pieces.append(memory)
        end = offset + memory.nbytes
    return pieces


def split_pieces(pieces: Iterable[memoryview], lengths: Iterable[int]) -> Iterator[list[memoryview]]:
    """Yield consecutive pieces of memory again, as groups of the given lengths in bytes; a piece may be cut."""
    rest, following = memoryview(b""), iter(pieces)
    for length in lengths:
        group: list[memoryview] = []
        while length > 0:
            piece = rest if rest.nbytes else next(following)
            rest = piece[length:]
            group.append(piece[:length])
            length -= piece.nbytes  # noqa: PLW2901 - below 0 if the piece was cut
        yield group
