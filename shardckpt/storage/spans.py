"""Cut ranges of a file into spans that are read and checked independently: no segment of the digests is in two."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.storage.digest import MAX_SEGMENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.storage.digest import Segments

#: (start, stop, digest) of a segment of a file.
Segment = tuple[int, int, int]
#: Most extra bytes that a span takes while it looks for a segment that ends where an element ends.
_STRETCH = 2 * MAX_SEGMENT


class Span(NamedTuple):
    """A range of a file that one call reads, up to before ``stop``; with its segments if digests are checked."""

    start: int
    stop: int
    segments: Sequence[Segment] = ()


class ElementRange(NamedTuple):
    """A run of elements in a file: offsets of the first and after the last, and the size of one, in bytes."""

    start: int
    stop: int
    unit: int = 1

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return (start, stop) of the complete elements in a range; the stop may be less if there is none."""
        low, high = max(self.start, start), min(self.stop, stop)
        return low + (self.start - low) % self.unit, high - (high - self.start) % self.unit


class Pieces(NamedTuple):
    """Ranges of a tensor's elements in a file, to be read in pieces through buffers.

    Attributes:
        file: Name of the file.
        elements: Where the elements lie in the file: no piece begins or ends inside an element.
        ranges: (start, stop) offsets of the requested bytes, ascending and disjoint; pieces may hold more bytes.
        what: A name for the ranges in errors: a key.
        pinned: Whether the buffers are pinned memory, from which a CUDA device copies asynchronously.
    """

    file: str
    elements: ElementRange
    ranges: Iterable[tuple[int, int]]
    what: str
    pinned: bool = False


def cut_spans(
    segments: Segments | None, ranges: Iterable[tuple[int, int]], most: int, elements: ElementRange
) -> Iterator[Span]:
    """Cut ranges of a file, ascending and disjoint, into spans, in file order.

    Where digests are checked, each span is of complete segments. It has each element completely, or leaves it to
    another span.

    A span has ``most`` bytes at most; more only where a segment is longer, or where an element crosses the end of a
    segment. If elements cross all ends, a span repeats the segments that hold the start of such an element.
    """
    if segments is not None:
        return _checked(segments, ranges, most, elements)
    step = most // elements.unit * elements.unit
    return (
        Span(low, min(low + step, stop)) for start, stop in ranges if start < stop for low in range(start, stop, step)
    )


def _checked(
    segments: Segments, ranges: Iterable[tuple[int, int]], most: int, elements: ElementRange
) -> Iterator[Span]:
    group: list[Segment] = []
    first = last = 0
    for start, stop in ranges:
        for segment in segments.touching(max(start, last), stop):
            low, high, _ = segment
            if group and (low != last or (high - first > most and (low - elements.start) % elements.unit == 0)):
                yield Span(first, last, group)
                group = []
            elif group and high - first > most + _STRETCH:
                yield Span(first, last, group)
                # elements cross all ends of segments: go on with the segments of the element that is cut here
                _, complete = elements.within(first, last)
                group = [segment for segment in group if segment[1] > complete]
                first = group[0][0]
            if not group:
                first = low
            group.append(segment)
            last = high
    if group:
        yield Span(first, last, group)
