"""Chunks that are read entirely, in columns: large runs in place, small neighbours at once through a buffer."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.chunks.read_ahead import SMALL_ITEM, ReadAhead, group_neighbours
from shardckpt.storage.range_reads import RangeRead
from shardckpt.tensors.raw_memory import view_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.storage.reader import CheckpointReader


class EntireChunks(NamedTuple):
    """Chunks whose bytes in a file are the values of a contiguous tensor in CPU memory, which the caller keeps.

    Attributes:
        file: The number of each chunk's file: int64 of shape (chunks,), as the other columns.
        start: Where its bytes begin in the file. None share bytes, except where a chunk is there twice.
        length: How many they are.
        address: Where they go in memory.
        tensor: The number of its tensor.
        files: The names of the files, by number.
        keys: The keys of the tensors, by number, for errors.
    """

    file: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    address: torch.Tensor
    tensor: torch.Tensor
    files: Sequence[str]
    keys: Sequence[str]

    def plan_reads(self) -> tuple[list[RangeRead], list[NeighbourRead]]:
        """Return the ranges that are read in place, in the order of the files, and groups of small neighbours.

        Chunks that follow each other in memory as they do in a file are one range.
        """
        if not len(self.file):
            return [], []
        chunks = self._sort()
        file, start, length, address = chunks.file, chunks.start, chunks.length, chunks.address
        stop = start + length
        follows = (file[1:] == file[:-1]) & (start[1:] == stop[:-1]) & (address[1:] == (address + length)[:-1])
        first = _find_firsts(~follows)
        stop = stop[torch.cat([first[1:], first.new_tensor([len(file)])]) - 1]
        file, start, address = file[first], start[first], address[first]
        small = (stop - start <= SMALL_ITEM).tolist()
        runs = _Runs(first.tolist(), file.tolist(), start.tolist(), stop.tolist(), address.tolist())
        ranges, neighbours = [], []
        for low, high in group_neighbours(runs.file, runs.start, runs.stop, small):
            if high - low > 1:
                neighbours.append(NeighbourRead(chunks, runs, low, high))
                continue
            memory = view_memory(runs.address[low], runs.stop[low] - runs.start[low], None)
            key = self.keys[int(chunks.tensor[runs.first[low]])]
            ranges.append(RangeRead(self.files[runs.file[low]], runs.start[low], memory, key))
        return ranges, neighbours

    def read_each(self, reader: CheckpointReader, rows: slice = slice(None)) -> None:
        """Read chunks one after the other, so that an error names the one that is damaged."""
        columns = (self.file, self.start, self.length, self.address, self.tensor)
        for file, start, length, address, tensor in zip(*(column[rows].tolist() for column in columns), strict=True):
            reader.read_into(self.files[file], start, view_memory(address, length, None), self.keys[tensor])

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

    def read(self, reader: CheckpointReader) -> None:
        """Read them; the CorruptCheckpointError of a damaged chunk names it."""
        chunks, (first, file, starts, stops, addresses) = self._chunks, self._runs
        low, high = self._numbers.start, self._numbers.stop
        with ReadAhead(reader, chunks.files[file[low]], starts[low], stops[high - 1]) as ahead:
            if not ahead:
                chunks.read_each(reader, slice(first[low], first[high] if high < len(first) else None))
                return
            for begin, end, address in zip(starts[low:high], stops[low:high], addresses[low:high], strict=True):
                ctypes.memmove(address, ahead.base + begin, end - begin)


def _find_firsts(breaks: torch.Tensor) -> torch.Tensor:
    """Return the row of the first of each group, where ``breaks[n]`` says that row ``n + 1`` begins one."""
    return torch.cat([breaks.new_ones(1), breaks]).nonzero().view(-1)
