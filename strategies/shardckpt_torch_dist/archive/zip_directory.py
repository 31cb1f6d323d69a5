"""Where the members of a stored zip lie, by its directory: all that the container of a ``torch.save`` archive is.

Format: APPNOTE.TXT 6.3, with the zip64 records, which torch always writes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

#: Reads (offset, size) of an archive; fewer bytes where it ends before.
ReadRange = Callable[[int, int], bytes]

_END = struct.Struct("<4s6xHIIH")  # the directory's entries, bytes and start; bytes of a comment
_LOCATOR = struct.Struct("<4s4xQ4x")  # where the next one is
_END64 = struct.Struct("<4s28xQQQ")  # as the first, but for the comment
_ENTRY = struct.Struct("<4s6xH8xIIHHH8xI")  # method; bytes stored, bytes; lengths of name, extra, comment; header
_HEADER = struct.Struct("<4s22xHH")  # lengths of name and extra
_EXTRA = struct.Struct("<HH")
_ZIP64_ID = 1
_MAX32 = 0xFFFFFFFF
#: Where the end record begins at most before the archive's end: read at once with the directory; with a comment.
_REACHES = (4096, _END.size + 0xFFFF)


class Member(NamedTuple):
    """Where its bytes are in the archive."""

    offset: int
    size: int


def members(read_range: ReadRange, size: int) -> dict[str, Member]:
    """The members by name.

    Args:
        read_range: Reads the archive.
        size: Its bytes.

    Raises:
        ValueError: it is no zip, or one with members that are compressed, or out of its bounds.
        struct.error: it is cut.
    """
    read, place = _ended(read_range, size)
    count, nbytes, start = _directory(read, place)
    if start + nbytes > place:
        raise ValueError("its directory is out of bounds")
    directory = read(start, nbytes)
    found: dict[str, Member] = {}
    place = 0
    for _ in range(count):
        magic, method, stored, nbytes, name_length, extra_length, comment, header = _ENTRY.unpack_from(directory, place)
        if magic != b"PK\x01\x02":
            raise ValueError("its directory is damaged")
        extra = place + _ENTRY.size + name_length
        name = directory[place + _ENTRY.size : extra].decode("utf-8", "backslashreplace")
        if _MAX32 in (stored, nbytes, header):
            nbytes, _, header = _wide((nbytes, stored, header), directory[extra : extra + extra_length])
        found[name] = _located(read, header, nbytes, method, name, size)
        place = extra + extra_length + comment
    return found


def _ended(read_range: ReadRange, size: int) -> tuple[ReadRange, int]:
    """Where the end record is, and what reads the archive: its last bytes from memory."""
    for reach in _REACHES:
        first = max(0, size - reach)
        tail = read_range(first, size - first)
        place = tail.rfind(b"PK\x05\x06")
        if place >= 0:
            break
    else:
        raise ValueError("it has no end record")

    def read(offset: int, nbytes: int) -> bytes:
        return tail[offset - first : offset - first + nbytes] if offset >= first else read_range(offset, nbytes)

    return read, first + place


def _directory(read: ReadRange, place: int) -> tuple[int, int, int]:
    """Entries, bytes and start of the directory, by the end record there."""
    _, count, nbytes, start, _ = _END.unpack(read(place, _END.size))
    if place >= _LOCATOR.size:
        magic, end64 = _LOCATOR.unpack(read(place - _LOCATOR.size, _LOCATOR.size))
        if magic == b"PK\x06\x07":
            magic, count, nbytes, start = _END64.unpack(read(end64, _END64.size))
            if magic != b"PK\x06\x06":
                raise ValueError("its end record of 64 bits is damaged")
    return count, nbytes, start


def _wide(values: tuple[int, int, int], extra: bytes) -> list[int]:
    """The values, those that 32 bits do not hold from an entry's extra field."""
    place = 0
    while True:
        kind, nbytes = _EXTRA.unpack_from(extra, place)
        place += _EXTRA.size
        if kind == _ZIP64_ID:
            break
        place += nbytes
    more = struct.iter_unpack("<Q", extra[place : place + nbytes // 8 * 8])
    return [value if value != _MAX32 else next(more, (value,))[0] for value in values]


def _located(read: ReadRange, header: int, nbytes: int, method: int, name: str, size: int) -> Member:
    """A member, by the header before its bytes."""
    magic, name_length, extra_length = _HEADER.unpack(read(header, _HEADER.size))
    offset = header + _HEADER.size + name_length + extra_length
    if magic != b"PK\x03\x04" or method or offset + nbytes > size:
        raise ValueError(f"its member {name!r} is compressed or out of bounds")
    return Member(offset, nbytes)


__all__ = ["Member", "ReadRange", "members"]
