"""Read units of items by several threads; small items that follow each other in a file are read at once."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.chunks.entire import MOST_GAP, SMALL_ITEM, NeighbourRead
from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.buffers import BLOCK_BYTES, block_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import TypeAlias

    import torch
    from typing_extensions import Self

    from shardckpt.chunks.entire import EntireChunks
    from shardckpt.chunks.stored import Item
    from shardckpt.storage.range_reads import RangeRead
    from shardckpt.storage.reader import CheckpointReader

    #: Reads an item, from memory if it was read ahead.
    ReadOne: TypeAlias = Callable[[Any, "ReadAhead | None"], None]
    #: Returns the range of a file that fills each item's target as it is; None where an item is read another way.
    FindRanges: TypeAlias = Callable[[Sequence[Any]], "Sequence[RangeRead | None]"]


@dataclass
class CoalescedRead:
    """Items that one thread reads one after the other.

    Attributes:
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


def read_units(
    reader: CheckpointReader,
    units: Iterable[Sequence[Any]],
    locate: Callable[[Any], Item],
    nbytes: Callable[[Any], int],
    read: ReadOne,
    find_ranges: FindRanges,
    entire: EntireChunks | None = None,
) -> None:
    """Read units of items with several threads; what fills a destination must be thread-safe.

    A unit is a list of items that one thread must read together, in order; units of one item are sorted by location.
    Most bytes are those of large items whose targets take them as they are: these are found first, and read by threads
    that do nothing else, while the calling thread reads the other items. ``find_ranges`` is called with the large items
    that are units of their own; ``nbytes`` returns how many bytes of an item are read. Chunks of ``entire`` are read,
    too. The error of a damaged item names it.
    """

    def size(group: CoalescedRead | NeighbourRead) -> int:
        # small items count as 0: they cost Python's time, not the disk's
        return 0 if isinstance(group, NeighbourRead) or group.small else sum(map(nbytes, group.items))

    large: list[CoalescedRead] = []
    ranges, neighbours = ([], []) if entire is None else entire.plan_reads()
    others: list[CoalescedRead | NeighbourRead] = [*neighbours]
    for group in _coalesce(units, locate):
        (others if group.small or len(group.items) > 1 else large).append(group)
    found = find_ranges([group.items[0] for group in large])
    others += [group for group, one in zip(large, found, strict=True) if one is None]
    read_others = partial(reader.map, partial(_read_group, reader, read=read), others, size)
    try:
        reader.read_ranges([*ranges, *filter(None, found)], read_others if others else None)
    except CorruptCheckpointError:
        if entire is not None:  # a range of many chunks has the key of the first
            entire.read_each(reader)
        raise


def read_in_order(reader: CheckpointReader, items: Iterable[Any], locate: Callable[[Any], Item], read: ReadOne) -> None:
    """Read items one after the other, all in this thread; the arguments are those of :func:`read_units`."""
    for group in _coalesce([(item,) for item in items], locate):
        _read_group(reader, group, read)


class ReadAhead:
    """A group of small items, read at once into a pooled buffer; a context manager, which returns the buffer.

    The reader reads any range outside the group, too.
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

    def view(self, item: Item) -> memoryview | None:
        """Return the bytes of an item of the group, valid until the group is read; None if they are not there."""
        first = item.offset - self._start
        return self._data[first : first + item.length] if first + item.length <= len(self._data) else None

    def copy(self, offset: int, target: torch.Tensor) -> None:
        """Copy bytes, which are within what :meth:`view` returned, to the memory of a contiguous CPU tensor.

        The offset is that of the first byte in the file.
        """
        ctypes.memmove(target.data_ptr(), self._address + offset - self._start, target.nbytes)


def _coalesce(units: Iterable[Sequence[Any]], locate: Callable[[Any], Item]) -> list[CoalescedRead]:
    """Return the units of items that must be read together as groups, with small units next to each other joined."""
    found: list[CoalescedRead] = []
    last: CoalescedRead | None = None
    for unit in units:
        file, start, length = locate(unit[0])
        small = len(unit) == 1 and length <= SMALL_ITEM
        joins = small and last is not None and last.small and last.file == file and 0 <= start - last.stop <= MOST_GAP
        if last is not None and joins and start + length - last.start <= BLOCK_BYTES:
            last.items.append(unit[0])
            last.stop = start + length
        else:
            last = CoalescedRead(list(unit), file, start, start + length, small)
            found.append(last)
    return found


def _read_group(reader: CheckpointReader, group: CoalescedRead | NeighbourRead, read: ReadOne) -> None:
    if isinstance(group, NeighbourRead):
        group.read(reader)
        return
    if not group.small or len(group.items) == 1:
        for item in group.items:
            read(item, None)
        return
    with ReadAhead(reader, group) as ahead:
        for item in group.items:
            read(item, ahead)
