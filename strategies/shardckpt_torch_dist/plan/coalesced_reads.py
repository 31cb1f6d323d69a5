"""Small items that follow each other in a file, put into runs, each of which is read at once."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import BLOCK_BYTES, block_pool
from shardckpt_torch_dist.plan.regions import SMALL_ITEM, our_archive

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    import torch
    from typing_extensions import Self

    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import Item

#: Bytes between two items of a run at most.
_GAP = 4 << 10


class Run(NamedTuple):
    """Items that are read one after the other by one thread.

    Attributes:
        items: They.
        file: Where they are, if they are small.
        start: Offset of the first one, in bytes, if they are small.
        stop: Offset behind the last one, in bytes, if they are small.
        small: Whether the whole is read ahead for them.
    """

    items: list[Any]
    file: str
    start: int
    stop: int
    small: bool


def runs(units: Iterable[Sequence[Any]], place: Callable[[Any], Item]) -> list[Run]:
    """The units in their order, small ones that lie next to each other joined.

    Args:
        units: Items that belong together; single ones sorted by their places.
        place: Where an item's archive is.
    """
    found: list[Run] = []
    items: list[Any] = []
    name, first, last = "", 0, 0
    for unit in units:
        file, start, length = place(unit[0])
        if len(unit) > 1 or length > SMALL_ITEM:
            found.append(Run(list(unit), file, start, start, small=False))
            continue
        if items and (file != name or not 0 <= start - last <= _GAP or start + length - first > BLOCK_BYTES):
            found.append(Run(items, name, first, last, small=True))
            items = []
        if not items:
            items, name, first = [], file, start
        items.append(unit[0])
        last = start + length
    if items:
        found.append(Run(items, name, first, last, small=True))
    return found


class ReadAhead:
    """A run in memory, read at once; a context manager. What does not lie in it is read as it is asked for.

    Args:
        reader: Reads the rest.
        run: Of small items.
    """

    def __init__(self, reader: CheckpointReader, run: Run) -> None:
        self._reader = reader
        self._file, self._start = run.file, run.start
        self._block = block_pool.acquire()
        self._data = self._block.view[: run.stop - run.start]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._block.view))
        try:
            reader.read_into(run.file, run.start, self._data, "small items")
        except CorruptCheckpointError:  # each item by itself, then: the damaged one is named
            self._data = self._data[:0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        block_pool.release(self._block)

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Bytes of a range."""
        place = offset - self._start
        if name == self._file and 0 <= place <= len(self._data) - nbytes:
            return bytes(self._data[place : place + nbytes])
        return self._reader.read_range(name, offset, nbytes, what)

    def copy(self, item: Item, shape: tuple[int, ...], target: torch.Tensor) -> bool:
        """Fill a tensor with an archive's payload; False if that is not, byte for byte, one that we write.

        Args:
            item: The archive.
            shape: Of the tensor in it, by what the index says.
            target: Contiguous memory for it, of the stored dtype, on the CPU.
        """
        ours = our_archive(target.dtype, shape, item.length)
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


__all__ = ["ReadAhead", "Run", "runs"]
