"""Digests: one CRC-32 a segment, so that any range of a file can be checked without reading the whole.

A file is tiled by segments of at most 4 MiB, cut where its records begin. The table of (length, CRC) pairs is stored
as two little-endian uint32 columns, deflated, in base64; its SHA-256 is the digest of the file.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import sys
import zlib
from array import array
from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ALGORITHM = "crc32"
SEGMENT_BYTES = 4 << 20
#: Records up to this size are one segment with all their parts.
SMALL_RECORD = 64 << 10
_MAX_TABLE = 1 << 31


class Segments:
    """Lengths and digests of the segments that tile a file, in file order."""

    def __init__(self, lengths: Iterable[int] = (), digests: Iterable[int] = ()) -> None:
        self.lengths = array("I", lengths)
        self.digests = array("I", digests)
        self._ends = list(accumulate(self.lengths))

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return len(self.lengths)

    def touching(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, digest) of the segments that hold any byte of the range."""
        number = bisect_right(self._ends, start)
        while number < len(self._ends) and self._ends[number] - self.lengths[number] < stop:
            end = self._ends[number]
            yield end - self.lengths[number], end, self.digests[number]
            number += 1

    def pack(self) -> str:
        """The table as text."""
        return base64.b64encode(zlib.compress(_little(self.lengths) + _little(self.digests), 1)).decode()

    def root(self) -> str:
        """The digest of the file: SHA-256 of the table, in hex."""
        return hashlib.sha256(_little(self.lengths) + _little(self.digests)).hexdigest()

    @classmethod
    def unpack(cls, text: str, root: str, size: int) -> Segments:
        """The table that :meth:`pack` wrote.

        Args:
            text: The table as text.
            root: Its digest.
            size: Bytes of the file that it is for; it bounds the table.

        Raises:
            CorruptCheckpointError: the text is not the table with this root, or not one for a file of this size.
        """
        try:
            inflate = zlib.decompressobj()
            raw = inflate.decompress(base64.b64decode(text, validate=True), min(_MAX_TABLE, 8 * size + 8))
        except (binascii.Error, zlib.error, ValueError) as exc:
            raise CorruptCheckpointError(f"the table of digests is damaged: {exc}") from exc
        if len(raw) % 8 or hashlib.sha256(raw).hexdigest() != root:
            raise CorruptCheckpointError("the table of digests is damaged: it does not have the digest that is stored")
        columns = array("I", raw)
        if sys.byteorder == "big":
            columns.byteswap()
        found = cls(columns[: len(columns) // 2], columns[len(columns) // 2 :])
        if found.size != size or max(found.lengths, default=0) > SEGMENT_BYTES:
            raise CorruptCheckpointError(f"the table of digests is for {found.size} bytes, or not cut as it should be")
        return found


def checksum(data: memoryview | bytes, start: int = 0) -> int:
    """CRC-32 of the data, going on from ``start``."""
    return zlib.crc32(data, start)


def segment_record(parts: list[memoryview]) -> list[tuple[int, int]]:
    """(length, digest) of a record's segments: one for a small record, else each part cut at ``SEGMENT_BYTES``."""
    total = sum(part.nbytes for part in parts)
    if total <= SMALL_RECORD:
        digest = 0
        for part in parts:
            digest = checksum(part, digest)
        return [(total, digest)] if total else []
    found = []
    for part in parts:
        for start in range(0, part.nbytes, SEGMENT_BYTES):
            piece = part[start : start + SEGMENT_BYTES]
            found.append((piece.nbytes, checksum(piece)))
    return found


def _little(column: array[int]) -> bytes:
    if sys.byteorder == "big":
        column = array("I", column)
        column.byteswap()
    return column.tobytes()


__all__ = ["ALGORITHM", "SEGMENT_BYTES", "SMALL_RECORD", "Segments", "checksum", "segment_record"]
