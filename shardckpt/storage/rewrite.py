"""Writing a file anew without some of its bytes: what stays is read, checked against its digests, and copied."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.digest import SMALL_RECORD

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.storage.reader import CheckpointReader
    from shardckpt.storage.writer import CheckpointWriter, FileWriter

#: Bytes that are read and handed to the writer at a time; it has as many of them in hand as it has threads.
_PIECE_BYTES = 8 << 20
#: What aligns an item lies between it and the one before; where there is more, it may be what is to be left out.
_GAP = 64


class KeptItem(NamedTuple):
    """Bytes of a file that go on in a new one.

    Attributes:
        key: Whose they are, for errors.
        start: Where they begin in the file.
        nbytes: How many they are.
        to: Where they begin in the new file; what lies between two items is filled with zeros.
        cuts: Where parts of them end that are read by themselves, counted from ``start``: digests are made for each.
    """

    key: str
    start: int
    nbytes: int
    to: int
    cuts: tuple[int, ...] = ()


def rewrite_file(name: str, items: Sequence[KeptItem], reader: CheckpointReader, writer: CheckpointWriter) -> None:
    """Write a file of the same name with some items of the old one, in the same order.

    Args:
        name: The file.
        items: What goes on, at least one item, in the order of both files.
        reader: Has the old file.
        writer: Makes the new one.

    Raises:
        CorruptCheckpointError: an item is not what was written: a damaged one gets no sound digest.
    """
    file = writer.create(name, items[-1].to + items[-1].nbytes)
    for run in _runs(items):
        if len(run) > 1 and file.sha256 is None:
            for item, data in zip(run, _read_run(name, run, reader), strict=True):
                file.append_small((bytes(item.to - file.position), data), what=item.key)
        else:  # a thread hashes behind this one: it reads what it writes, so that nothing piles up between them
            for item in run:
                _copy(name, item, reader, file)
    writer.finish(file)


def _runs(items: Sequence[KeptItem]) -> Iterator[list[KeptItem]]:
    """Small items that follow each other are one run, and read at once; a large one is a run of its own."""
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
    except CorruptCheckpointError:  # each by itself, then: the damaged one is named
        return [memoryview(reader.read_range(name, item.start, item.nbytes, item.key)) for item in run]
    return [data[item.start - first : item.start - first + item.nbytes] for item in run]


def _copy(name: str, item: KeptItem, reader: CheckpointReader, file: FileWriter) -> None:
    """Copy an item in pieces, each of which is read when it is written."""

    def read(start: int, stop: int, zeros: int) -> list[memoryview]:
        data = reader.read_range(name, item.start + start, stop - start, item.key)
        return [memoryview(bytes(zeros)), memoryview(data)]

    zeros, keys = item.to - file.position, 1
    for low, high in pairwise((0, *item.cuts, item.nbytes)):
        for start in range(low, max(high, low + 1), _PIECE_BYTES):
            stop = min(start + _PIECE_BYTES, high)
            file.append(zeros + stop - start, partial(read, start, stop, zeros), keys, item.key)
            zeros = keys = 0


__all__ = ["KeptItem", "rewrite_file"]
