"""Small items that follow each other in a file, read at once."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.buffers import BLOCK_BYTES, block_pool
from shardckpt.storage.digest import SMALL_RECORD
from shardckpt.tensors.raw_memory import view_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import TypeAlias

    from typing_extensions import Self

    from shardckpt.storage.reader import CheckpointReader

    #: Where bytes begin in a file, how many there are, and the address of the memory that gets them.
    Target: TypeAlias = tuple[int, int, int]

#: Bytes. Items up to this size, each under one digest, are read together with their neighbours.
SMALL_ITEM = SMALL_RECORD
#: The largest gap in bytes between two items that are read at once.
_MOST_GAP = 4 << 10
#: Bytes. Smaller targets, on average, are filled from a buffer in less time than a system call takes to fill them.
_WORTH_A_PART = 3 << 10


class ReadAhead:
    """A range of small items, read at once into a pooled buffer; a context manager, which returns the buffer.

    The reader reads any range outside of it, too. Nothing is there if the range is damaged: then each item is read by
    itself, so that the error names the damaged one.

    Args:
        reader: Reads the file.
        file: Its name.
        start: Where the range begins in the file.
        stop: Where it ends.
        targets: The memory that gets bytes of the range, in the order of the file; not if the range is damaged.
        owner: Keeps the memory of the targets alive.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        file: str,
        start: int,
        stop: int,
        targets: Sequence[Target] = (),
        owner: object = None,
    ) -> None:
        self._reader = reader
        self._file, self._start = file, start
        self._block = block_pool.acquire()
        self._data = self._block.view[: stop - start]
        #: The address of the file's first byte, if that were in memory, too.
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._block.view)) - start
        #: Whether the bytes of the targets are in the buffer, too.
        self._is_entire = True
        try:
            if self._read_in_place(targets, owner):
                self._is_entire = False
                return
            reader.read_into(file, start, self._data, "small items")
        except CorruptCheckpointError:  # perhaps the bytes between the items are damaged
            self._data = self._data[:0]
            return
        for offset, nbytes, address in targets:
            ctypes.memmove(address, self._base + offset, nbytes)

    def _read_in_place(self, targets: Sequence[Target], owner: object) -> bool:
        """Read the range with the targets' bytes into their memory, if that is faster; return whether it was done."""
        if not targets or len(self._data) < len(targets) * _WORTH_A_PART:
            return False
        first = min(address for _, _, address in targets)
        memory = view_memory(first, sys.maxsize, owner)  # one view, whose slices are cheap
        parts = [
            (offset - self._start, memory[address - first : address - first + nbytes])
            for offset, nbytes, address in targets
        ]
        return self._reader.read_parts(self._file, self._start, parts, self._data, "small items")

    def __bool__(self) -> bool:
        return bool(self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        block_pool.release(self._block)

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Return the bytes of a range, from memory if it was read ahead."""
        place = offset - self._start
        if self._is_entire and name == self._file and 0 <= place <= len(self._data) - nbytes:
            return bytes(self._data[place : place + nbytes])
        return self._reader.read_range(name, offset, nbytes, what)

    def has_frame(self, start: int, stop: int, frame: tuple[bytes, bytes]) -> bool:
        """Return whether bytes ``start`` to ``stop`` of the file are in memory, and begin and end as ``frame`` says."""
        head, tail = frame
        low, high = start - self._start, stop - self._start
        data = self._data
        return high <= len(data) and data[low : low + len(head)] == head and data[high - len(tail) : high] == tail

    def copy_framed(self, start: int, stop: int, nbytes: int, address: int, frame: tuple[bytes, bytes]) -> bool:
        """Copy an item's values to memory; return whether it has the frame, and so many bytes between.

        If not, nothing is copied. It is bytes ``start`` to ``stop`` of the file.
        """
        head, tail = frame
        if (
            not self._is_entire
            or stop - start != len(head) + nbytes + len(tail)
            or not self.has_frame(start, stop, frame)
        ):
            return False
        ctypes.memmove(address, self._base + start + len(head), nbytes)
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
