"""Digests: a table of segments that survives the way through text, and finds the segments of any range."""

from __future__ import annotations

import base64
import hashlib
import zlib
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.digest import SEGMENT_BYTES, SMALL_RECORD, Segments, checksum, segment_record

LENGTHS = st.lists(st.integers(1, SEGMENT_BYTES), max_size=30)
DIGEST = st.integers(0, 2**32 - 1)
TABLES = LENGTHS.flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.lists(DIGEST, min_size=len(lengths), max_size=len(lengths)))
)


@given(TABLES)
def test_round_trip(table: tuple[list[int], list[int]]) -> None:
    """A table is the same after pack and unpack, and its root is the SHA-256 of both columns, little-endian."""
    segments = Segments(*table)
    found = Segments.unpack(segments.pack(), segments.root(), segments.size)
    assert (list(found.lengths), list(found.digests)) == table
    assert len(found) == len(table[0])
    columns = b"".join(value.to_bytes(4, "little") for column in table for value in column)
    assert segments.root() == hashlib.sha256(columns).hexdigest()


@given(TABLES, st.data())
def test_segments_of_a_range(table: tuple[list[int], list[int]], data: st.DataObject) -> None:
    """A range gets exactly the segments that hold any byte of it, in order, with their bounds and digests."""
    segments = Segments(*table)
    start = data.draw(st.integers(0, segments.size))
    stop = data.draw(st.integers(start, segments.size))
    ends = list(accumulate(table[0]))
    expected = [
        (end - length, end, digest)
        for end, length, digest in zip(ends, *table, strict=True)
        if start < stop and end - length < stop and start < end
    ]
    assert [found for found in segments.touching(start, stop) if start < stop] == expected


@given(TABLES, st.integers(0), st.integers(0, 7))
def test_every_flipped_bit_of_the_text_is_noticed(table: tuple[list[int], list[int]], place: int, bit: int) -> None:
    """A damaged table is refused, or is still the same table."""
    segments = Segments(*table)
    text = bytearray(segments.pack().encode())
    text[place % len(text)] ^= 1 << bit
    try:
        found = Segments.unpack(text.decode("latin-1"), segments.root(), segments.size)
    except CorruptCheckpointError:
        return
    assert (list(found.lengths), list(found.digests)) == table


def packed(raw: bytes) -> tuple[str, str]:
    """Any bytes as the text of a table, and their root."""
    return base64.b64encode(zlib.compress(raw)).decode(), hashlib.sha256(raw).hexdigest()


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (b"\1\0\0\0" * 2, 2),  # one segment of 1 byte for a file of 2
        (b"\1\0\0\0" * 3, 1),  # columns of unequal length
        (b"\1\0\0", 1),  # not whole numbers
        (bytes(800_000_000 // 100), 10),  # a bomb: more segments than the file has bytes
        ((SEGMENT_BYTES + 1).to_bytes(4, "little") * 2, SEGMENT_BYTES + 1),  # a segment that is too long to check
    ],
)
def test_tables_for_another_file(raw: bytes, size: int) -> None:
    """A table that has its root and does not fit the file is refused, before more memory is taken than it needs."""
    with pytest.raises(CorruptCheckpointError, match="the table of digests is"):
        Segments.unpack(*packed(raw), size)


def test_no_text() -> None:
    """What is neither base64 nor deflated is refused."""
    for text in ("§", "AAAA", "", "e\ud800"):
        with pytest.raises(CorruptCheckpointError, match="the table of digests is damaged"):
            Segments.unpack(text, "00", 10)


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_small_records_are_one_segment(parts: list[bytes]) -> None:
    """A small record is one segment over all its parts, an empty one none."""
    whole = b"".join(parts)
    assert segment_record([memoryview(part) for part in parts]) == ([(len(whole), zlib.crc32(whole))] if whole else [])


def test_large_records_are_cut() -> None:
    """A large record is cut at its parts, and each part at 4 MiB: together they are the record's bytes."""
    head, body = b"h" * 100, bytes(range(256)) * (2 * SEGMENT_BYTES // 256 + 3)
    found = segment_record([memoryview(head), memoryview(body)])
    pieces = [head, *(body[start : start + SEGMENT_BYTES] for start in range(0, len(body), SEGMENT_BYTES))]
    assert found == [(len(piece), zlib.crc32(piece)) for piece in pieces]
    assert len(body) > SMALL_RECORD


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_checksum_goes_on(first: bytes, second: bytes) -> None:
    """The checksum of two pieces, one after the other, is that of the whole."""
    assert checksum(second, checksum(first)) == checksum(first + second)
