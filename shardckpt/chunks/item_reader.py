"""Schedule the reads of a load: large ranges by threads that only read, small neighbours at once, all else in units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.chunks.read_ahead import SMALL_ITEM, ReadAhead, group_neighbours
from shardckpt.chunks.regions import Region, StagedRegion
from shardckpt.errors import CorruptCheckpointError
from shardckpt.tensors.memory import is_ordinary, synchronize_devices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch

    from shardckpt.chunks.entire import EntireChunks
    from shardckpt.chunks.stored import Chunk, ChunkIndex, Item
    from shardckpt.storage.range_reads import RangeRead
    from shardckpt.storage.reader import CheckpointReader


class _Group(NamedTuple):
    """Items that one thread reads one after the other; small ones from a block that is read first."""

    items: Sequence[Any]
    file: str
    start: int
    stop: int
    is_small: bool


class ItemReader(ABC):
    """Reads regions of stored tensors, and what else a format stores; a format says how bytes become values.

    An item is a :class:`Region`, a :class:`StagedRegion`, or of a class of the format's own. What fills a destination
    must be thread-safe.

    Attributes:
        reader: Reads the files.
        index: What is stored.
    """

    def __init__(self, reader: CheckpointReader, index: ChunkIndex) -> None:
        self.reader = reader
        self.index = index

    @abstractmethod
    def find_payloads(self, chunks: Sequence[tuple[Chunk, torch.dtype, str]]) -> Iterable[int | None]:
        """Return where the payload of each chunk begins in its file; None if :meth:`read_chunk` must find it.

        Each comes with its stored dtype and its tensor's key.
        """

    @abstractmethod
    def copy_chunk(self, chunk: Chunk, target: torch.Tensor, ahead: ReadAhead) -> bool:
        """Copy an entire chunk, that was read ahead, to a contiguous CPU tensor of its dtype; return whether it did."""

    @abstractmethod
    def read_chunk(
        self, chunk: Chunk, start: Sequence[int], target: torch.Tensor, dtype: torch.dtype, key: str, data: bytes | None
    ) -> None:
        """Read a box of a chunk, which begins at ``start`` in it, into a tensor of the box's shape, with a cast.

        ``dtype`` is the stored one, and ``data`` has the bytes of the chunk's item, if they were read already.
        """

    @abstractmethod
    def locate_other(self, item: Any) -> Item:
        """Return where an item is that is no region."""

    @abstractmethod
    def read_other(self, item: Any, ahead: ReadAhead | None) -> None:
        """Read an item that is no region, from memory if it was read ahead."""

    def locate(self, item: Any) -> Item:
        """Return where an item is; to sort by it is to read each file from front to back."""
        return item.chunk.item if isinstance(item, Region | StagedRegion) else self.locate_other(item)

    def read_units(self, units: Iterable[Sequence[Any]], entire: EntireChunks | None = None) -> None:
        """Read units of items, and chunks that are read entirely, with several threads.

        A unit is a list of items that one thread must read together, in order; units of one item are sorted by
        location. Most bytes are those of large items whose targets take them as they are: these are found first, and
        read by threads that do nothing else, while the calling thread reads the other items. The error of a damaged
        item names it.
        """
        ranges, neighbours = ([], []) if entire is None else entire.plan_reads()
        alone: list[_Group] = []
        others: list[_Group] = []
        for group in self._coalesce(units):
            is_alone = len(group.items) == 1 and not group.is_small and isinstance(group.items[0], Region)
            (alone if is_alone else others).append(group)
        found = self._find_ranges([group.items[0] for group in alone])
        others += [group for group, one in zip(alone, found, strict=True) if one is None]
        # small items count as 0: they cost Python's time, not the disk's
        jobs: list[tuple[int, Callable[[], None]]] = [(0, partial(each.read, self.reader)) for each in neighbours]
        for group in others:
            nbytes = 0 if group.is_small else sum(map(self._count_bytes, group.items))
            jobs.append((nbytes, partial(self._read_group, group)))
        read_others = partial(self.reader.map, _run_job, jobs, itemgetter(0)) if jobs else None
        try:
            self.reader.read_ranges([*ranges, *filter(None, found)], read_others)
        except CorruptCheckpointError:
            if entire is not None:  # a range of many chunks has the key of the first
                entire.read_each(self.reader)
            raise

    def read_in_order(self, items: Iterable[Any]) -> None:
        """Read items one after the other, all in this thread."""
        for group in self._coalesce((item,) for item in items):
            self._read_group(group)

    def _coalesce(self, units: Iterable[Sequence[Any]]) -> Iterator[_Group]:
        """Yield units of items that must be read together as groups, with small units next to each other joined."""
        found = [(unit, *self.locate(unit[0])) for unit in units]
        files, starts = [file for _, file, _, _ in found], [start for _, _, start, _ in found]
        stops = [start + length for _, _, start, length in found]
        small = [len(unit) == 1 and length <= SMALL_ITEM for unit, _, _, length in found]
        for low, high in group_neighbours(files, starts, stops, small):
            items = [item for unit, *_ in found[low:high] for item in unit]
            yield _Group(items, files[low], starts[low], stops[high - 1], small[low])

    def _find_ranges(self, regions: Sequence[Region]) -> list[RangeRead | None]:
        """Return the range of a file that fills each region as it is; None for those that are read another way."""
        keys, dtypes = self.index.keys, self.index.dtypes
        chunks = [(region.chunk, dtypes[region.number], keys[region.number]) for region in regions]
        return [
            None if payload is None else region.find_range(payload, dtype, key)
            for region, payload, (_, dtype, key) in zip(regions, self.find_payloads(chunks), chunks, strict=True)
        ]

    def _count_bytes(self, item: Any) -> int:
        return item.nbytes if isinstance(item, Region | StagedRegion) else self.locate_other(item).length

    def _read_group(self, group: _Group) -> None:
        if not group.is_small or len(group.items) == 1:
            for item in group.items:
                self._read(item, None)
            return
        with ReadAhead(self.reader, group.file, group.start, group.stop) as ahead:
            for item in group.items:
                self._read(item, ahead)

    def _read(self, item: Any, ahead: ReadAhead | None) -> None:
        """Read an item, from memory if it was read ahead."""
        if isinstance(item, Region):
            self._read_region(item, ahead)
        elif isinstance(item, StagedRegion):
            self._read_region(item.resolve(), ahead)
            item.staged.commit()
        else:
            self.read_other(item, ahead)

    def _read_region(self, region: Region, ahead: ReadAhead | None) -> None:
        chunk, target = region.chunk, region.target
        key, dtype = self.index.keys[region.number], self.index.dtypes[region.number]
        # its target may be filled by a copy of all bytes of the stored tensor
        takes_bytes = region.is_entire and target.dtype == dtype and is_ordinary(target)
        if ahead is not None and takes_bytes and self.copy_chunk(chunk, target, ahead):
            return
        data = None if ahead is None else ahead.read_range(*chunk.item, key)
        self.read_chunk(chunk, region.start, target, dtype, key, data)
        synchronize_devices([target])  # this thread's stream is not the caller's


def _run_job(job: tuple[int, Callable[[], None]]) -> None:
    job[1]()
