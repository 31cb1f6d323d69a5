"""Cutting ranges of a file into spans that are read and checked by themselves, no segment of digests in two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.storage.digest import MAX_SEGMENT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.storage.digest import Segments

#: Where a segment begins and ends, and its digest.
Segment = tuple[int, int, int]
#: Bytes that a span may have more than were asked for, until a segment ends where an element does.
_STRETCH = 2 * MAX_SEGMENT


class Span(NamedTuple):
    """Bytes that one call reads.

    Attributes:
        start: Offset of the first one in the file.
        stop: Offset behind the last one.
        segments: What tiles it, where digests are checked.
    """

    start: int
    stop: int
    segments: Sequence[Segment] = ()


class Elements(NamedTuple):
    """A run of elements in a file.

    Attributes:
        start: Offset of the first one's first byte.
        stop: Offset behind the last one.
        unit: Bytes of one.
    """

    start: int
    stop: int
    unit: int = 1

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Where the whole elements in a range begin and end."""
        low, high = max(self.start, start), min(self.stop, stop)
        return low + (self.start - low) % self.unit, high - (high - self.start) % self.unit


def cut(segments: Segments | None, ranges: Iterable[tuple[int, int]], most: int, elements: Elements) -> Iterator[Span]:
    """The spans that hold some ranges of a file, in file order.

    Args:
        segments: The file's table, if digests are checked: spans then begin and end with segments.
        ranges: (start, stop) of each, ascending and apart from each other.
        most: Bytes of a span; more only where a segment has more, or elements go across the ends of segments. Where
            they always do, a span begins with the segments again that hold the beginning of such an element.
        elements: Which no end of a span cuts.
    """
    if segments is not None:
        return _checked(segments, ranges, most, elements)
    step = most // elements.unit * elements.unit
    return (
        Span(low, min(low + step, stop)) for start, stop in ranges if start < stop for low in range(start, stop, step)
    )


def _checked(segments: Segments, ranges: Iterable[tuple[int, int]], most: int, elements: Elements) -> Iterator[Span]:
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
                _, whole = elements.within(first, last)
                group = [segment for segment in group if segment[1] > whole]
                first = group[0][0]
            if not group:
                first = low
            group.append(segment)
            last = high
    if group:
        yield Span(first, last, group)


def batches(spans: Iterable[Span], most: int) -> Iterator[list[Span]]:
    """The spans in lists of about ``most`` bytes: what a thread takes at a time."""
    batch: list[Span] = []
    nbytes = 0
    for span in spans:
        batch.append(span)
        nbytes += span.stop - span.start
        if nbytes >= most or len(batch) >= most >> 12:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch


__all__ = ["Elements", "Segment", "Span", "batches", "cut"]
