"""Spans: ranges of a file cut at the ends of segments and of elements."""

from __future__ import annotations

from shardckpt.storage.digest import MAX_SEGMENT, Segments
from shardckpt.storage.spans import ElementRange, cut_spans
from tests.tables import table


@table("unit", [4, 8, 16])
def test_segments_that_never_end_with_an_element(unit: int) -> None:
    """Where elements lie across the ends of all segments spans stay small, and every element is whole in one."""
    count, size = 100, 1 << 20
    segments = Segments([size] * count, range(count), "crc32")
    elements = ElementRange(2, 2 + (count * size - 2) // unit * unit, unit)
    spans = list(cut_spans(segments, [(elements.start, elements.stop)], size, elements))
    assert max(span.stop - span.start for span in spans) <= size + 2 * MAX_SEGMENT + size
    assert sum(span.stop - span.start for span in spans) <= count * size + len(spans) * size
    reached = elements.start
    for span in spans:
        low, high = elements.within(span.start, span.stop)
        assert low <= reached < high
        assert [(start, stop) for start, stop, _ in span.segments] == [
            (at, at + size) for at in range(span.start, span.stop, size)
        ]
        reached = high
    assert reached == elements.stop
