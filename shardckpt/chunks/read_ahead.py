"""Small items that follow each other in a file, read at once."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.buffers import BLOCK_BYTES, block_pool
from shardckpt.storage.digest import SMALL_RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from shardckpt.storage.reader import CheckpointReader

#: Bytes. Items up to this size, each under one digest, are read together with their neighbours.
SMALL_ITEM = SMALL_RECORD
#: The largest gap in bytes between two items that are read at once.
_MOST_GAP = 4 << 10


class ReadAhead:
    """A range of small items, read at once into a pooled buffer; a context manager, which returns the buffer.

    The reader reads any range outside of it, too. Nothing is there if the range is damaged: then each item is read by
    itself, so that the error names the damaged one.

    Attributes:
        base: The address of the file's first byte, if that were in memory, too.
    """

    def __init__(self, reader: CheckpointReader, file: str, start: int, stop: int) -> None:
        self._reader = reader
        self._file, self._start = file, start
        self._block = block_pool.acquire()
        self._data = self._block.view[: stop - start]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._block.view)) - start
        try:
            reader.read_into(file, start, self._data, "small items")
        except CorruptCheckpointError:  # perhaps the bytes between the items are damaged
            self._data = self._data[:0]

    def __bool__(self) -> bool:
        return bool(self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        block_pool.release(self._block)

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Return the bytes of a range, from memory if it was read ahead."""
        place = offset - self._start
        if name == self._file and 0 <= place <= len(self._data) - nbytes:
            return bytes(self._data[place : place + nbytes])
        return self._reader.read_range(name, offset, nbytes, what)

    def copy_framed(
        self, start: int, stop: int, offset: int, nbytes: int, address: int, frame: tuple[bytes, bytes]
    ) -> bool:
        """Copy ``nbytes`` of an item's values to memory, from ``offset`` on; return whether the item has the frame.

        If it lacks the frame or is not in memory, nothing is copied. It is bytes ``start`` to ``stop`` of the file.
        """
        head, tail = frame
        low, high = start - self._start, stop - self._start
        first, last = low + len(head), high - len(tail)
        data = self._data
        if high > len(data) or first + offset + nbytes > last or data[low:first] != head or data[last:high] != tail:
            return False
        ctypes.memmove(address, self.base + start + len(head) + offset, nbytes)
        return True


def group_neighbours(
    files: Sequence[Any], starts: Sequence[int], stops: Sequence[int], small: Sequence[bool]
) -> Iterator[tuple[int, int, int]]:
    """Yield the first number of each group of ranges that are read at once, the number behind the last, and the end.

    Small ranges that follow each other in a file are a group, as many as a block has room for; any other is one alone.
    A range may be there several times.
    """
    low = begin = end = 0
    name, joins = None, False
    for n, (file, start, stop, is_small) in enumerate(zip(files, starts, stops, small, strict=True)):
        if joins and is_small and file == name and begin <= start <= end + _MOST_GAP and stop - begin <= BLOCK_BYTES:
            end = max(end, stop)
            continue
        if n:
            yield low, n, end
        low, begin, end, name, joins = n, start, stop, file, is_small
    if files:
        yield low, len(files), end
