"""Chunks that are read entirely, in columns: large runs in place, small neighbours at once through a buffer."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.chunks.read_ahead import SMALL_ITEM, ReadAhead, group_neighbours
from shardckpt.storage.range_reads import RangeRead
from shardckpt.tensors.raw_memory import view_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from shardckpt.chunks.regions import Region
    from shardckpt.planning.boxes import Ints
    from shardckpt.storage.reader import CheckpointReader

    #: The bytes before and after the values in an item.
    Frame: TypeAlias = tuple[bytes, bytes]
    #: Returns the frames of items, by the dtypes, the shapes and the lengths in bytes; None for one that is not known.
    FindFrames: TypeAlias = Callable[[Sequence[torch.dtype], Sequence[Ints], Sequence[int]], Sequence[Frame | None]]


class EntireChunks(NamedTuple):
    """Chunks whose values in a file are those of a contiguous tensor in CPU memory, which the caller keeps.

    Attributes:
        file: The number of each chunk's file: int64 of shape (chunks,), as the other columns.
        start: Where its item begins in the file. None share bytes, except where a chunk is there twice.
        length: How many bytes it has.
        address: Where the values go in memory.
        tensor: The number of its tensor.
        region: The number of its region, for ``list_regions``.
        files: The names of the files, by number.
        keys: The keys of the tensors, by number, for errors.
        list_regions: Returns regions by their numbers: how a chunk is read whose frame is another, or that is damaged.
        frames: The frame of each item, which is small then; none if all bytes of items are values.
    """

    file: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    address: torch.Tensor
    tensor: torch.Tensor
    region: torch.Tensor
    files: Sequence[str]
    keys: Sequence[str]
    list_regions: Callable[[torch.Tensor], Sequence[Region]]
    frames: Sequence[Frame]

    def plan_reads(self) -> tuple[list[RangeRead], list[NeighbourRead]]:
        """Return the ranges that are read in place, in the order of the files, and groups of small neighbours.

        Chunks that follow each other in memory as they do in a file are one range; none with frames do.
        """
        if not len(self.file):
            return [], []
        chunks = self._sort()
        file, start, length, address = chunks.file, chunks.start, chunks.length, chunks.address
        stop = start + length
        follows = (file[1:] == file[:-1]) & (start[1:] == stop[:-1]) & (address[1:] == (address + length)[:-1])
        first = _find_firsts(follows.new_ones(len(follows)) if self.frames else ~follows)
        stop = stop[torch.cat([first[1:], first.new_tensor([len(file)])]) - 1]
        file, start, address = file[first], start[first], address[first]
        small = [True] * len(file) if self.frames else (stop - start <= SMALL_ITEM).tolist()
        runs = _Runs(first.tolist(), file.tolist(), start.tolist(), stop.tolist(), address.tolist())
        ranges, neighbours = [], []
        for low, high in group_neighbours(runs.file, runs.start, runs.stop, small):
            if high - low > 1 or self.frames:
                neighbours.append(NeighbourRead(chunks, runs, low, high))
                continue
            memory = view_memory(runs.address[low], runs.stop[low] - runs.start[low], None)
            key = self.keys[int(chunks.tensor[runs.first[low]])]
            ranges.append(RangeRead(self.files[runs.file[low]], runs.start[low], memory, key))
        return ranges, neighbours

    def _sort(self) -> EntireChunks:
        """Return the chunks in the order of the files."""
        file, start = self.file, self.start
        if not bool(((file[1:] < file[:-1]) | ((file[1:] == file[:-1]) & (start[1:] < start[:-1]))).any()):
            return self
        order = start.argsort(stable=True)
        order = order[file[order].argsort(stable=True)]
        return self._replace(
            file=file[order],
            start=start[order],
            length=self.length[order],
            address=self.address[order],
            tensor=self.tensor[order],
            region=self.region[order],
            frames=[self.frames[row] for row in order.tolist()] if self.frames else (),
        )


class _Runs(NamedTuple):
    """Chunks that follow each other in a file and in memory.

    Attributes:
        first: The row of the first chunk of each run.
        file: The number of its file.
        start: Where it begins in the file, in bytes.
        stop: Where it ends.
        address: Where it begins in memory.
    """

    first: list[int]
    file: list[int]
    start: list[int]
    stop: list[int]
    address: list[int]


class NeighbourRead:
    """Runs of small chunks, ``low`` to before ``high``, which one thread reads at once into a buffer and copies."""

    def __init__(self, chunks: EntireChunks, runs: _Runs, low: int, high: int) -> None:
        self._chunks = chunks
        self._runs = runs
        self._numbers = slice(low, high)

    def read(self, reader: CheckpointReader, read_one: Callable[[Region, ReadAhead], None]) -> None:
        """Read them; ``read_one`` reads a region whose frame is another, or that is damaged: its error names it."""
        chunks, (first, file, starts, stops, addresses) = self._chunks, self._runs
        low, high = self._numbers.start, self._numbers.stop
        others = [*range(first[low], first[high] if high < len(first) else len(chunks.file))]
        with ReadAhead(reader, chunks.files[file[low]], starts[low], stops[high - 1]) as ahead:
            copies = zip(starts[low:high], stops[low:high], addresses[low:high], strict=True)
            if chunks.frames:  # each run is one chunk
                others = [
                    row
                    for row, (begin, end, address) in zip(others, copies, strict=True)
                    if not ahead.copy_framed(begin, end, chunks.frames[row], address)
                ]
            elif ahead:
                for begin, end, address in copies:
                    ctypes.memmove(address, ahead.base + begin, end - begin)
                return
            for region in chunks.list_regions(chunks.region[others]) if others else ():
                read_one(region, ahead)


def _find_firsts(breaks: torch.Tensor) -> torch.Tensor:
    """Return the row of the first of each group, where ``breaks[n]`` says that row ``n + 1`` begins one."""
    return torch.cat([breaks.new_ones(1), breaks]).nonzero().view(-1)
