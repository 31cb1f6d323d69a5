"""Coalesce the reads of small items that follow each other in a file: each group is read at once."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import BLOCK_BYTES, block_pool
from shardckpt_torch_dist.plan.regions import SMALL_ITEM, build_own_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import Item

#: The largest gap in bytes between two items that are read at once.
_GAP = 4 << 10


class CoalescedRead(NamedTuple):
    """Items that one thread reads one after the other.

    Attributes:
        items: The items: :class:`Region` objects, or DCP's read items.
        file: The file of the small items.
        start: Where the first small item begins, in bytes.
        stop: Where the last small item ends, in bytes.
        small: Whether the items are small, so that [start, stop) is read at once.
    """

    items: list[Any]
    file: str
    start: int
    stop: int
    small: bool


def coalesce(units: Iterable[Sequence[Any]], locate: Callable[[Any], Item]) -> list[CoalescedRead]:
    """Join small units that are next to each other in a file.

    Args:
        units: Items that must be read together; units of one item sorted by their places.
        locate: Returns where an item's archive is.

    Returns:
        The groups, in the order of the units.
    """
    found: list[CoalescedRead] = []
    items: list[Any] = []
    name, first, last = "", 0, 0
    for unit in units:
        file, start, length = locate(unit[0])
        if len(unit) > 1 or length > SMALL_ITEM:
            found.append(CoalescedRead(list(unit), file, start, start, small=False))
            continue
        if items and (file != name or not 0 <= start - last <= _GAP or start + length - first > BLOCK_BYTES):
            found.append(CoalescedRead(items, name, first, last, small=True))
            items = []
        if not items:
            items, name, first = [], file, start
        items.append(unit[0])
        last = start + length
    if items:
        found.append(CoalescedRead(items, name, first, last, small=True))
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block_pool.release(self._block)

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Return the bytes of a range, from memory if it was read ahead."""
        place = offset - self._start
        if name == self._file and 0 <= place <= len(self._data) - nbytes:
            return bytes(self._data[place : place + nbytes])
        return self._reader.read_range(name, offset, nbytes, what)

    def copy(self, item: Item, shape: tuple[int, ...], target: torch.Tensor) -> bool:
        """Copy an archive's payload into a tensor, without parsing the archive.

        Args:
            item: The archive.
            shape: The shape of its tensor, by the index.
            target: The tensor to fill: contiguous, of the stored dtype, on the CPU.

        Returns:
            Whether it was copied; False if the archive is not, byte for byte, as we write it.
        """
        ours = build_own_archive(target.dtype, shape, item.length)
        if ours is None:
            return False
        head, tail, _ = ours
        first = item.offset - self._start
        payload = first + len(head)
        end = first + item.length
        nbytes = target.nbytes
        if end > len(self._data) or payload + nbytes + len(tail) != end:
            return False
        if self._data[first:payload] != head or self._data[payload + nbytes : end] != tail:
            return False
        ctypes.memmove(target.data_ptr(), self._address + payload, nbytes)
        return True


__all__ = ["CoalescedRead", "ReadAhead", "coalesce"]
