"""Copy a file without some of its items: the others are read, checked against their digests, and written."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.digest import SMALL_RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardckpt.storage.file_writer import FileWriter
    from shardckpt.storage.reader import CheckpointReader
    from shardckpt.storage.writer import CheckpointWriter
    from shardckpt.strategy import KeptItem

#: Bytes that are read and passed to the writer at a time; about one such piece for each of its threads is in memory.
_PIECE_BYTES = 8 << 20
#: Bytes of alignment that may lie between two items that are read together; a larger gap may be a dropped item.
_GAP = 64


def rewrite_file(
    name: str,
    items: Sequence[KeptItem],
    reader: CheckpointReader,
    writer: CheckpointWriter,
    head: bytes = b"",
    count_bytes: Callable[[int], None] | None = None,
) -> None:
    """Write a file of the same name with some items of the old one, in the same order.

    ``items`` has those to keep, at least one, in the order of both files. ``count_bytes`` is called with the bytes of
    items that were given to the writer. A damaged item is a CorruptCheckpointError: copied unchecked, it would get a
    digest that matches the damage.
    """
    file = writer.create(name, items[-1].to + items[-1].nbytes)
    first = head + bytes(items[0].to - len(head))
    if first:
        file.append_small((first,), keys=0, what="the header")
    # the bytes of a gap are written behind an item, not before one: a segment of digests begins where an item does
    ends = [*(item.to for item in items[1:]), items[-1].to + items[-1].nbytes]
    gaps = iter([end - item.to - item.nbytes for item, end in zip(items, ends, strict=True)])
    for run in _group_small(items):
        if len(run) > 1 and file.sha256 is None:
            for item, data in zip(run, _read_run(name, run, reader), strict=True):
                file.append_small((data, bytes(next(gaps))), what=item.key)
        else:  # the file's SHA-256 thread calls read() itself: data read here would pile up before it
            for item in run:
                _copy(name, item, next(gaps), reader, file)
        if count_bytes is not None:
            count_bytes(sum(item.nbytes for item in run))
    writer.finish(file)


def _group_small(items: Sequence[KeptItem]) -> Iterator[list[KeptItem]]:
    """Group small items that follow each other, to read each group at once; a large item is alone."""
    run: list[KeptItem] = []
    for item in items:
        if run:
            end = run[-1].start + run[-1].nbytes
            is_next = 0 <= item.start - end < _GAP and item.start + item.nbytes - run[0].start <= _PIECE_BYTES
            if not is_next or max(item.nbytes, run[0].nbytes) > SMALL_RECORD:
                yield run
                run = []
        run.append(item)
    yield run


def _read_run(name: str, run: list[KeptItem], reader: CheckpointReader) -> list[memoryview]:
    first, stop = run[0].start, run[-1].start + run[-1].nbytes
    try:
        data = memoryview(reader.read_range(name, first, stop - first, "small items"))
    except CorruptCheckpointError:  # read each alone: the error then names the damaged one
        return [memoryview(reader.read_range(name, item.start, item.nbytes, item.key)) for item in run]
    return [data[item.start - first : item.start - first + item.nbytes] for item in run]


def _copy(name: str, item: KeptItem, gap: int, reader: CheckpointReader, file: FileWriter) -> None:
    """Copy an item, and zeros behind it, in pieces that are read when the writer asks for them: that bounds memory."""

    def read(start: int, stop: int, zeros: int) -> list[memoryview]:
        data = reader.read_range(name, item.start + start, stop - start, item.key)
        return [memoryview(data), memoryview(bytes(zeros))]

    keys = 1
    for low, high in pairwise((0, *item.cuts, item.nbytes)):
        for start in range(low, max(high, low + 1), _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, high)
            zeros, gap = (gap, 0) if stop == item.nbytes else (0, gap)
            file.append(stop - start + zeros, partial(read, start, stop, zeros), keys, item.key)
            keys = 0
