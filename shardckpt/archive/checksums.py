"""Compare the members of archives with the CRC-32 that their zip directory has of each, where there are no digests.

This is the only place that does. torch.save writes a CRC-32 of every member unless it is told not to; torch.load never
looks at it. A zero says that the writer made none: this package's own archives, whose checkpoints have digests.
"""

from __future__ import annotations

import functools
import os
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING

from shardckpt.archive.zip_directory import Member
from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.tensors.memory import LARGE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from shardckpt.archive.payload import StoredPayload
    from shardckpt.storage.reader import CheckpointReader, Take
    from shardckpt.storage.scatter import Source
    from shardckpt.storage.spans import Pieces

#: Bytes of a member that are in memory at a time.
_BLOCK = 1 << 20
#: Bytes of a member that a thread reads at a time.
_PIECE = 16 << 20
#: The polynomial of CRC-32, with its bits reversed.
_POLYNOMIAL = 0xEDB88320
_BITS = 32


def check_memory(data: bytes | bytearray | memoryview, crc: int, what: str) -> None:
    """Compare bytes in memory with their CRC-32 (zero is none); CorruptCheckpointError if they differ."""
    if crc and zlib.crc32(data) != crc:
        raise _differs_error(what)


def write_crcs(path: Path, tensors: Iterable[tuple[int, int, tuple[int, int]]]) -> None:
    """Read the tensors of a file that was written, and write the CRC-32 of each; they are durable at the return.

    Each tensor is given by its offset, its size in bytes, and the two offsets where the archive has its CRC-32.
    """
    block = memoryview(bytearray(_BLOCK))
    with wrap_os_errors("write checksums into", path), path.open("r+b", buffering=0) as file:
        for start, nbytes, places in tensors:
            file.seek(start)
            crc, left = 0, nbytes
            while left:
                count = file.readinto(block[: min(left, _BLOCK)])
                if not count:
                    raise CorruptCheckpointError(f"{path} ends within a tensor: {left} bytes are missing")
                crc, left = zlib.crc32(block[:count], crc), left - count
            for place in places:
                file.seek(place)
                file.write(crc.to_bytes(4, "little"))
        os.fsync(file.fileno())


def clear_crcs(path: Path, crcs: Iterable[tuple[int, int]]) -> None:
    """Set each CRC-32 to zero, which says that it is not known, where an unfinished file has a place for it.

    The file need not exist.
    """
    if not path.exists():
        return
    with wrap_os_errors("clear checksums in", path), path.open("r+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        for place in (place for places in crcs for place in places):
            if place < size:
                file.seek(place)
                file.write(bytes(min(4, size - place)))


@contextmanager
def summed(
    reader: CheckpointReader, file: str, stored: StoredPayload, nbytes: int, key: str, first: int = 0
) -> Iterator[Source]:
    """Yield a source to read a tensor's storage from; at the end of the block compare the storage with its CRC-32.

    A storage that is read as a whole is summed while it is read. One that is read in part is then read once more, as a
    whole, if it is small, or if the reader checks every part that it reads. A storage that differs is a
    CorruptCheckpointError. ``nbytes`` is how many of its bytes the block reads, ``first`` where the archive begins in
    the file.
    """
    member = Member(first + stored.offset, stored.nbytes, stored.crc)
    if not stored.crc or reader.crcs == "none":
        yield reader
        return
    what = f"{key}: {reader.directory / file}"
    if nbytes == member.size:
        source = _SummedSource(reader)
        yield source
        if source.total() != (member.size, member.crc):
            raise _differs_error(f"{what}: {_name_range(member)}")
        return
    yield reader
    if reader.crcs == "parts" or member.size <= LARGE:
        check_member(reader, file, member, what)


def combine_crc32(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two pieces that follow each other, from the CRC-32 of each."""
    return _multiply(_make_shift(nbytes), first) ^ second


@functools.lru_cache(64)  # most pieces are of one size
def _make_shift(nbytes: int) -> list[int]:
    """Return the matrix over GF(2) that makes of a CRC-32 the one with so many bytes of zeros behind."""
    power = [_POLYNOMIAL, *(1 << bit for bit in range(_BITS - 1))]  # one bit of zeros; squared, two
    for _ in range(3):
        power = [_multiply(power, row) for row in power]
    found = [1 << bit for bit in range(_BITS)]
    while nbytes:
        if nbytes & 1:
            found = [_multiply(power, row) for row in found]
        nbytes >>= 1
        power = [_multiply(power, row) for row in power] if nbytes else power
    return found


def _multiply(matrix: list[int], vector: int) -> int:
    found, row = 0, 0
    while vector:
        if vector & 1:
            found ^= matrix[row]
        vector >>= 1
        row += 1
    return found


class _SummedSource:
    """Reads a storage as a whole, in any pieces, and keeps the CRC-32 of each piece."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._pieces: list[tuple[int, int, int]] = []  # offset, size, CRC-32; threads append to it

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill memory from a range.

        On this machine it is summed block by block, while a block is in the processor's cache, by several threads.
        """
        memory, reader = buffer.cast("B"), self._reader
        if takes_requests(reader.place):  # one for each block
            reader.read_into(name, offset, memory, what)
            self._add(offset, memory)
            return

        def read(first: int) -> None:
            crc, piece = 0, memory[first : first + _PIECE]
            for low in range(0, piece.nbytes, _BLOCK):
                block = piece[low : low + _BLOCK]
                reader.read_into(name, offset + first + low, block, what)
                crc = zlib.crc32(block, crc)
            self._pieces.append((offset + first, piece.nbytes, crc))

        reader.map(read, range(0, memory.nbytes, _PIECE), lambda first: min(_PIECE, memory.nbytes - first))

    def read_pieces(self, pieces: Pieces, take: Take) -> None:
        """Read ranges in pieces, and sum each before it is taken."""

        def add_and_take(offset: int, memory: memoryview) -> Callable[[], None] | None:
            self._add(offset, memory)
            return take(offset, memory)

        self._reader.read_pieces(pieces, add_and_take)

    def total(self) -> tuple[int, int]:
        """Return the number of bytes that were read, and their CRC-32."""
        size = crc = 0
        for _, nbytes, piece in sorted(self._pieces):
            crc = combine_crc32(crc, piece, nbytes) if size else piece
            size += nbytes
        return size, crc

    def _add(self, offset: int, memory: memoryview) -> None:
        self._pieces.append((offset, memory.nbytes, zlib.crc32(memory)))


def check_member(reader: CheckpointReader, file: str, member: Member, what: str) -> None:
    """Read a member in blocks, once in the life of a reader, and compare it with its CRC-32; zero is none.

    The member's offset is one of the file. One that differs is a CorruptCheckpointError.
    """

    def check() -> bool:
        block = memoryview(bytearray(min(member.size, _BLOCK)))
        crc = 0
        for begin in range(0, member.size, _BLOCK):
            piece = block[: min(_BLOCK, member.size - begin)]
            reader.read_into(file, member.offset + begin, piece, what)
            crc = zlib.crc32(piece, crc)
            reader.count_checked(piece.nbytes)
        return crc == member.crc

    if member.crc and not reader.parsed(f"crc32 {file} {member.offset}", check):
        raise _differs_error(f"{what}: {_name_range(member)}")


def _name_range(member: Member) -> str:
    return f"bytes {member.offset} to {member.offset + member.size}"


def _differs_error(what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{what} have changed since they were written: they do not have the CRC-32 that the archive has of them"
    )
