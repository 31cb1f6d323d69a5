"""Read the directory of an uncompressed zip, the container of a ``torch.save`` archive.

Format: APPNOTE.TXT 6.3, with the zip64 records, which torch always writes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

#: Reads (offset, size) of an archive, in bytes; returns fewer bytes at its end.
ReadRange = Callable[[int, int], bytes]

_END = struct.Struct("<4s6xHIIH")  # number of entries, size and start of the directory, size of the comment
_LOCATOR = struct.Struct("<4s4xQ4x")  # where the zip64 end record is
_END64 = struct.Struct("<4s28xQQQ")  # as the end record, without a comment
#: An entry of the directory: signature, compression method, CRC-32, compressed size, real size, lengths of the name,
#: the extra field and the comment, offset of the member's local header.
_ENTRY = struct.Struct("<4s6xH4xIIIHHH8xI")
_HEADER = struct.Struct("<4s4xH16xHH")  # signature, compression method, lengths of name and extra field
_EXTRA = struct.Struct("<HH")
_ZIP64_ID = 1
_MAX32 = 0xFFFFFFFF
#: Bytes to read from the end when looking for the end record: the first also have the whole directory of one tensor, in
#: the archives of torch; the second the directory of a state dict; the third the longest comment.
_TAIL_SIZES = (1024, 4096, _END.size + 0xFFFF)


class CompressedError(ValueError):
    """A member is compressed: a range of its bytes cannot be read by itself."""


class Member(NamedTuple):
    """The location of a zip member's bytes in the archive, and its CRC-32; 0 if its writer made none."""

    offset: int
    size: int
    crc: int


def read_members(read_range: ReadRange, size: int) -> dict[str, Member]:
    """Return the members of a zip of ``size`` bytes by name.

    It is a ValueError if it is not a zip, or a member is out of bounds, a CompressedError if a member is compressed,
    and a struct.error if the zip is truncated.
    """
    read, place = _find_end(read_range, size)
    count, nbytes, start = _read_end_record(read, place)
    if start + nbytes > place:
        raise ValueError("its directory is out of bounds")
    directory = read(start, nbytes)
    found: dict[str, Member] = {}
    place = 0
    for _ in range(count):
        magic, method, crc, stored, nbytes, *lengths, header = _ENTRY.unpack_from(directory, place)
        name_length, extra_length, comment = lengths
        if magic != b"PK\x01\x02":
            raise ValueError("its directory is damaged")
        extra = place + _ENTRY.size + name_length
        name = directory[place + _ENTRY.size : extra].decode("utf-8", "backslashreplace")
        if _MAX32 in (stored, nbytes, header):
            nbytes, _, header = _zip64_values((nbytes, stored, header), directory[extra : extra + extra_length])
        found[name] = Member(_locate_member(read, header, nbytes, method, name, size), nbytes, crc)
        place = extra + extra_length + comment
    return found


def _find_end(read_range: ReadRange, size: int) -> tuple[ReadRange, int]:
    """Find the end record; return its offset, and a reader that has the last bytes of the archive in memory."""
    for tail_size in _TAIL_SIZES:
        first = max(0, size - tail_size)
        tail = read_range(first, size - first)
        place = tail.rfind(b"PK\x05\x06")
        if place >= 0:
            break
    else:
        raise ValueError("it has no end record")

    def read(offset: int, nbytes: int) -> bytes:
        return tail[offset - first : offset - first + nbytes] if offset >= first else read_range(offset, nbytes)

    return read, first + place


def _read_end_record(read: ReadRange, place: int) -> tuple[int, int, int]:
    """Return the number of entries, the size and the start of the directory, from the end record at ``place``."""
    _, count, nbytes, start, _ = _END.unpack(read(place, _END.size))
    if place >= _LOCATOR.size:
        magic, end64 = _LOCATOR.unpack(read(place - _LOCATOR.size, _LOCATOR.size))
        if magic == b"PK\x06\x07":
            magic, count, nbytes, start = _END64.unpack(read(end64, _END64.size))
            if magic != b"PK\x06\x06":
                raise ValueError("its end record of 64 bits is damaged")
    return count, nbytes, start


def _zip64_values(values: tuple[int, int, int], extra: bytes) -> list[int]:
    """Return the values of an entry; values that do not fit 32 bits come from its zip64 extra field, in order."""
    place = 0
    while True:
        kind, nbytes = _EXTRA.unpack_from(extra, place)
        place += _EXTRA.size
        if kind == _ZIP64_ID:
            break
        place += nbytes
    more = struct.iter_unpack("<Q", extra[place : place + nbytes // 8 * 8])
    return [value if value != _MAX32 else next(more, (value,))[0] for value in values]


def _locate_member(read: ReadRange, header: int, nbytes: int, method: int, name: str, size: int) -> int:
    """Return the offset of a member's bytes, by its local header: names there may be longer than the directory's."""
    magic, own_method, name_length, extra_length = _HEADER.unpack(read(header, _HEADER.size))
    offset: int = header + _HEADER.size + name_length + extra_length
    if magic != b"PK\x03\x04" or offset + nbytes > size:
        raise ValueError(f"its member {name!r} is out of bounds")
    if method == own_method != 0:
        raise CompressedError(f"its member {name!r} is compressed")
    if method:
        raise ValueError(f"its directory and its member {name!r} differ")
    return offset
