"""Regions contiguous in a file and in memory: which are read in place, and which small neighbours together."""

from __future__ import annotations

import ctypes
import sys
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.chunks.read_ahead import SMALL_ITEM, ReadAhead, group_neighbours
from shardckpt.errors import CorruptCheckpointError
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
    #: Reads a region by itself.
    ReadOne: TypeAlias = Callable[[Region, ReadAhead], None]

#: Bytes. Shorter runs, on average, are copied out of a buffer in less time than a system call takes to fill them. A
#: call takes 1,024 pieces of memory (IOV_MAX): the runs of a block, and the bytes between them.
_WORTH_A_PART = 3 << 10


class NeighbourRead(NamedTuple):
    """A read of small neighbours at once into a buffer, and their copies into memory.

    Attributes:
        shared_bytes: As many bytes are worth another thread; 0 where the copies cost more of Python's time than threads
            save.
        read: Reads and copies them.
    """

    shared_bytes: int
    read: Callable[[CheckpointReader, ReadOne], None]


class ContiguousRegions(NamedTuple):
    """Regions whose elements follow each other in the file as in the CPU memory of a shard, which the caller keeps.

    They are in the order of the files.

    Attributes:
        file: The number of each region's file: int64 of shape (regions,), as the other columns.
        start: Where the item of its chunk begins in the file.
        stop: Where the item ends.
        offset: Bytes of the item's values that are before the region.
        nbytes: Bytes of the region.
        address: Where they go in memory.
        tensor: The number of its tensor in the index.
        row: Its row among the regions of the load; the argument of ``make_regions``.
        files: The names of the files, by number.
        keys: The keys of the tensors, by number, for errors.
        make_regions: Returns regions as objects, by their rows, to read one by itself; keeps the shards alive.
    """

    file: torch.Tensor
    start: torch.Tensor
    stop: torch.Tensor
    offset: torch.Tensor
    nbytes: torch.Tensor
    address: torch.Tensor
    tensor: torch.Tensor
    row: torch.Tensor
    files: Sequence[str]
    keys: Sequence[str]
    make_regions: Callable[[torch.Tensor], Sequence[Region]]

    def select(self, is_kept: torch.Tensor) -> ContiguousRegions:
        """Return some of them, by a bool for each."""
        if bool(is_kept.all()):
            return self
        return self._replace(
            file=self.file[is_kept],
            start=self.start[is_kept],
            stop=self.stop[is_kept],
            offset=self.offset[is_kept],
            nbytes=self.nbytes[is_kept],
            address=self.address[is_kept],
            tensor=self.tensor[is_kept],
            row=self.row[is_kept],
        )

    def list_joined(self) -> Sequence[Region]:
        """Return the regions that are read as one range with others: an error of the range names the first of them."""
        if not len(self.file):
            return ()
        bounds = [*self._join().first, len(self.file)]
        several = [range(low, high) for low, high in pairwise(bounds) if high - low > 1]
        return self.make_regions(self.row[[*chain(*several)]]) if several else ()

    def plan_reads(self) -> tuple[list[RangeRead], list[NeighbourRead]]:
        """Return the ranges that are read in place, in the order of the files, and the reads of small neighbours.

        Regions that follow each other in memory as they do in a file are one range.
        """
        ranges: list[RangeRead] = []
        neighbours: list[NeighbourRead] = []
        if not len(self.file):
            return ranges, neighbours
        runs = self._join()
        small = [stop - start <= SMALL_ITEM for start, stop in zip(runs.start, runs.stop, strict=True)]
        for low, high, stop in group_neighbours(runs.file, runs.start, runs.stop, small):
            if high - low > 1:
                read = partial(self._read_runs, runs, low, high, stop)
                neighbours.append(NeighbourRead(stop - runs.start[low], read))
                continue
            memory = view_memory(runs.address[low], runs.nbytes[low], self.make_regions)
            key = self.keys[int(self.tensor[runs.first[low]])]
            ranges.append(RangeRead(self.files[runs.file[low]], runs.begin[low], memory, key))
        return ranges, neighbours

    def _join(self) -> _Runs:
        """Merge regions that are adjacent in the file and in memory; there is at least one region."""
        file, address = self.file, self.address
        begin = self.start + self.offset
        end = begin + self.nbytes
        follows = (file[1:] == file[:-1]) & (begin[1:] == end[:-1]) & (address[1:] == (address + self.nbytes)[:-1])
        is_first = torch.cat([follows.new_ones(1), ~follows])
        first = is_first.nonzero().view(-1)
        last = torch.cat([first[1:], first.new_tensor([len(file)])]) - 1
        return _Runs(
            first=first.tolist(),
            file=file[first].tolist(),
            start=self.start[first].tolist(),
            stop=self.stop[last].tolist(),
            begin=begin[first].tolist(),
            nbytes=(end[last] - begin[first]).tolist(),
            address=address[first].tolist(),
        )

    def _read_runs(
        self, runs: _Runs, low: int, high: int, stop: int, reader: CheckpointReader, read_one: ReadOne
    ) -> None:
        """Read some runs with one request, each into its memory.

        If a digest of the range differs, each region is read by itself, so that the error names the damaged tensor.
        """
        file, start = self.files[runs.file[low]], runs.start[low]
        targets = [*zip(runs.begin[low:high], runs.nbytes[low:high], runs.address[low:high], strict=True)]
        if stop - start >= len(targets) * _WORTH_A_PART and self._read_in_place(file, start, stop, targets, reader):
            return
        with ReadAhead(reader, file, start, stop) as ahead:
            if ahead:
                for begin, nbytes, address in targets:
                    ctypes.memmove(address, ahead.base + begin, nbytes)
                return
            last = runs.first[high] if high < len(runs.first) else len(self.file)
            for region in self.make_regions(self.row[runs.first[low] : last]):
                read_one(region, ahead)

    def _read_in_place(
        self, file: str, start: int, stop: int, targets: Sequence[tuple[int, int, int]], reader: CheckpointReader
    ) -> bool:
        """Read a range into targets (offset in the file, bytes, address) by one call; return whether it is sound."""
        first = min(address for _, _, address in targets)
        memory = view_memory(first, sys.maxsize, self.make_regions)  # one view, whose slices are cheap
        parts = [(begin, memory[address - first : address - first + nbytes]) for begin, nbytes, address in targets]
        try:
            return reader.read_parts(file, start, stop, parts, "small items")
        except CorruptCheckpointError:  # perhaps the bytes between the items are damaged
            return False


class _Runs(NamedTuple):
    """Runs: one region, or several that follow each other in a file and in memory.

    Attributes:
        first: The place of the first region of each run among the :class:`ContiguousRegions`.
        file: The number of its file.
        start: Where the item of its first region begins in the file, in bytes.
        stop: Where the item of its last region ends.
        begin: Where the run itself begins.
        nbytes: Its bytes.
        address: Where it begins in memory.
    """

    first: list[int]
    file: list[int]
    start: list[int]
    stop: list[int]
    begin: list[int]
    nbytes: list[int]
    address: list[int]


class FramedRegions(NamedTuple):
    """Contiguous regions of small items that have other bytes around the values.

    Attributes:
        regions: The regions.
        frames: The frame that the item of each is expected to have. One that has another is read by itself.
    """

    regions: ContiguousRegions
    frames: Sequence[Frame]

    def list_joined(self) -> Sequence[Region]:
        """Return no region: an error names the tensor of the damaged item."""
        return ()

    def plan_reads(self) -> tuple[list[RangeRead], list[NeighbourRead]]:
        """Return the reads of neighbours; see :meth:`ContiguousRegions.plan_reads`."""
        regions = self.regions
        starts, stops = regions.start.tolist(), regions.stop.tolist()
        places = regions.offset.tolist(), regions.nbytes.tolist(), regions.address.tolist()
        copies = [*zip(starts, stops, *places, self.frames, strict=True)]
        groups = group_neighbours(regions.file.tolist(), starts, stops, [True] * len(starts))
        # 0: frames are compared in Python, where two threads take 5 % longer than one
        return [], [NeighbourRead(0, partial(self._read_items, copies, low, high, end)) for low, high, end in groups]

    def _read_items(
        self,
        copies: Sequence[tuple[int, int, int, int, int, Frame]],
        low: int,
        high: int,
        end: int,
        reader: CheckpointReader,
        read_one: ReadOne,
    ) -> None:
        """Read some items with one request, and copy their values; an item with another frame is read by itself."""
        regions = self.regions
        with ReadAhead(reader, regions.files[int(regions.file[low])], copies[low][0], end) as ahead:
            others = [row for row in range(low, high) if not ahead.copy_framed(*copies[row])]
            for region in regions.make_regions(regions.row[others]) if others else ():
                read_one(region, ahead)
