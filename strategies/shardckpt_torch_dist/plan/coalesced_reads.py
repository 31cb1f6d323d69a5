"""Coalesce the reads of small items that follow each other in a file: each group is read at once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import BLOCK_BYTES, block_pool
from shardckpt_torch_dist.plan.regions import SMALL_ITEM, build_own_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from typing_extensions import Self

    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import Item
    from shardckpt_torch_dist.plan.requested import Region

#: The largest gap in bytes between two items that are read at once.
_GAP = 4 << 10


@dataclass
class CoalescedRead:
    """Items that one thread reads one after the other.

    Attributes:
        items: The items: :class:`Region` objects, or DCP's read items.
        file: The file of the first item.
        start: Where the first item begins, in bytes.
        stop: Where the last item ends, in bytes, if the items are small.
        small: Whether the items are small, so that [start, stop) is read at once.
    """

    items: list[Any]
    file: str
    start: int
    stop: int
    small: bool


def coalesce(units: Iterable[Sequence[Any]], locate: Callable[[Any], Item]) -> list[CoalescedRead]:
    """Return the units of items that must be read together as groups, with small units next to each other joined.

    Args:
        units: The units; those of one item are sorted by their locations.
        locate: Returns where an item's archive is.
    """
    found: list[CoalescedRead] = []
    last: CoalescedRead | None = None
    for unit in units:
        file, start, length = locate(unit[0])
        small = len(unit) == 1 and length <= SMALL_ITEM
        joins = small and last is not None and last.small and last.file == file and 0 <= start - last.stop <= _GAP
        if last is not None and joins and start + length - last.start <= BLOCK_BYTES:
            last.items.append(unit[0])
            last.stop = start + length
        else:
            last = CoalescedRead(list(unit), file, start, start + length, small)
            found.append(last)
    return found


class ReadAhead:
    """A group of small items, read at once into a pooled buffer; a context manager, which returns the buffer.

    Args:
        reader: Reads the file, and any range outside the group.
        group: The small items.
    """

    def __init__(self, reader: CheckpointReader, group: CoalescedRead) -> None:
        self._reader = reader
        self._file, self._start = group.file, group.start
        self._block = block_pool.acquire()
        self._data = self._block.view[: group.stop - group.start]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._block.view))
        try:
            reader.read_into(group.file, group.start, self._data, "small items")
        except CorruptCheckpointError:  # then each item is read by itself, so that the error names the damaged one
            self._data = self._data[:0]

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

    def copy(self, region: Region) -> bool:
        """Copy the stored tensor into a region's target, without parsing the archive.

        Args:
            region: An entire chunk; its target is contiguous, of the stored dtype, on the CPU.

        Returns:
            Whether it was copied; False if the archive is not, byte for byte, as we write it.
        """
        item, target = region.chunk.item, region.target
        ours = build_own_archive(target.dtype, region.chunk.box.shape, item.length)
        if ours is None:
            return False
        head, tail, _ = ours
        first = item.offset - self._start
        payload, end, nbytes = first + len(head), first + item.length, target.nbytes
        if end > len(self._data) or payload + nbytes + len(tail) != end:
            return False
        if self._data[first:payload] != head or self._data[payload + nbytes : end] != tail:
            return False
        ctypes.memmove(target.data_ptr(), self._address + payload, nbytes)
        return True
