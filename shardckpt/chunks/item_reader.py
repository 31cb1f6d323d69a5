"""Schedule the reads of a load: large ranges by threads that only read, small neighbours at once, all else in units."""

from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from shardckpt.chunks.read_ahead import SMALL_ITEM, ReadAhead, group_neighbours
from shardckpt.chunks.regions import LateRegion, ObjectRead, Region
from shardckpt.chunks.requested import RequestedTensors
from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.storage.scatter import StoredArray, read_box
from shardckpt.tensors.memory import synchronize_devices
from shardckpt.tensors.wrappers import copy_box

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardckpt.chunks.entire import EntireChunks
    from shardckpt.chunks.stored import Chunk, ChunkIndex
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.storage.range_reads import RangeRead
    from shardckpt.storage.reader import CheckpointReader

#: What is read; each has an ``item``, where it is stored, and ``nbytes``.
Read: TypeAlias = Region | LateRegion | ObjectRead


class _Group(NamedTuple):
    """Reads that one thread does one after the other; small ones from a block that is read first."""

    reads: Sequence[Read]
    file: str
    start: int
    stop: int
    is_small: bool


class ItemReader:
    """Reads regions of stored tensors, and objects. What fills a destination must be thread-safe.

    An item is the values of its chunk, as bytes. Of a format where it is more, :meth:`find_payloads` and
    :meth:`read_region` are overridden.

    Attributes:
        reader: Reads the files.
        index: What is stored.
    """

    #: Whether an item is the values alone: entire chunks are then planned and read in columns.
    has_plain_items = True

    def __init__(self, reader: CheckpointReader, index: ChunkIndex) -> None:
        self.reader = reader
        self.index = index

    def find_payloads(self, chunks: Sequence[tuple[Chunk, torch.dtype, str]]) -> Iterable[int | None]:
        """Return where the payload of each chunk begins in its file; None if :meth:`read_region` must find it.

        Each comes with its stored dtype and its tensor's key.
        """
        return [chunk.item.offset for chunk, _, _ in chunks]

    def read_region(self, region: Region, dtype: torch.dtype, key: str, source: CheckpointReader | ReadAhead) -> None:
        """Fill the target of a region, which may have another dtype than the stored one.

        ``source`` reads the file; it has the item in memory if that is small.
        """
        chunk, target = region.chunk, region.target
        if not isinstance(source, ReadAhead):
            stored = StoredArray(chunk.item.file, chunk.item.offset, dtype, chunk.box.shape)
            read_box(source, stored, region.start, target, key)
        elif target.numel():
            data = bytearray(source.read_range(*chunk.item, key))
            values = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(chunk.box.shape)
            copy_box(values, region.start, target)

    def read_units(self, units: Iterable[Sequence[Read]], entire: EntireChunks | None = None) -> None:
        """Read units, and chunks that are read entirely, with several threads.

        A unit is a list of reads that one thread must do, in order; units of one read are sorted by their items. Most
        bytes are those of large items whose targets take them as they are: these are found first, and read by threads
        that do nothing else, while the calling thread reads the others. The error of a damaged item names it.
        """
        ranges, neighbours = ([], []) if entire is None else entire.plan_reads()
        alone: list[_Group] = []
        regions: list[Region] = []
        others: list[_Group] = []
        for group in _coalesce(units):
            first = group.reads[0]
            if len(group.reads) == 1 and not group.is_small and isinstance(first, Region):
                alone.append(group)
                regions.append(first)
            else:
                others.append(group)
        found = self._find_ranges(regions)
        others += [group for group, one in zip(alone, found, strict=True) if one is None]
        # small items count as 0: they cost Python's time, not the disk's
        jobs: list[tuple[int, Callable[[], None]]] = [(0, partial(each.read, self.reader)) for each in neighbours]
        for group in others:
            nbytes = 0 if group.is_small else sum(each.nbytes for each in group.reads)
            jobs.append((nbytes, partial(self._read_group, group)))
        read_others = partial(self.reader.map, _run_job, jobs, itemgetter(0)) if jobs else None
        try:
            self.reader.read_ranges([*ranges, *filter(None, found)], read_others)
        except CorruptCheckpointError:
            if entire is not None:  # a range of many chunks has the key of the first
                entire.read_each(self.reader)
            raise

    def read_in_order(self, reads: Iterable[Read]) -> None:
        """Do one read after the other, all in this thread."""
        for group in _coalesce((each,) for each in reads):
            self._read_group(group)

    def _find_ranges(self, regions: Sequence[Region]) -> list[RangeRead | None]:
        """Return the range of a file that fills each region as it is; None for those that are read another way."""
        keys, dtypes = self.index.keys, self.index.dtypes
        chunks = [(region.chunk, dtypes[region.number], keys[region.number]) for region in regions]
        return [
            None if payload is None else region.find_range(payload, dtype, key)
            for region, payload, (_, dtype, key) in zip(regions, self.find_payloads(chunks), chunks, strict=True)
        ]

    def _read_group(self, group: _Group) -> None:
        if not group.is_small or len(group.reads) == 1:
            for each in group.reads:
                self._read(each, self.reader)
            return
        with ReadAhead(self.reader, group.file, group.start, group.stop) as ahead:
            for each in group.reads:
                self._read(each, ahead)

    def _read(self, each: Read, source: CheckpointReader | ReadAhead) -> None:
        """Do one read, from memory if its item was read ahead."""
        if isinstance(each, Region):
            self._fill(each, source)
        elif isinstance(each, ObjectRead):
            each.load(source.read_range(*each.item, each.what))
        else:
            target = each.get_target()
            self._fill(each.fill(target), source)
            each.commit(target)

    def _fill(self, region: Region, source: CheckpointReader | ReadAhead) -> None:
        self.read_region(region, self.index.dtypes[region.number], self.index.keys[region.number], source)
        if not region.target.is_cpu:  # most are, and a call takes as long as to copy a small one
            synchronize_devices([region.target])  # this thread's stream is not the caller's


class LoadPlan:
    """The reads of one rank's shards, checked before anything is read; errors are those of :class:`RequestedTensors`.

    ``find_object`` returns how an object is read, and raises if it is not stored.
    """

    def __init__(
        self, wanted: Sequence[ShardedBase], items: ItemReader, find_object: Callable[[ShardedObject], ObjectRead]
    ) -> None:
        self._items = items
        tensors = [shard for shard in wanted if isinstance(shard, ShardedTensor)]
        self._tensors = RequestedTensors(tensors, items.index, items.reader)
        self._objects: list[ObjectRead] = []
        for shard in wanted if len(tensors) < len(wanted) else ():
            if type(shard) is ShardedTensor:  # most are, and to ask whether one is an object is slow
                continue
            if isinstance(shard, ShardedObject):
                self._objects.append(find_object(shard))
            elif not isinstance(shard, ShardedTensor):
                raise ShardingError(
                    f"{shard.key!r} is a {type(shard).__name__}: only tensors and objects can be loaded"
                )

    def read(self) -> None:
        """Read everything into the destinations."""
        entire = self._tensors.split_entire() if self._items.has_plain_items else None
        units: list[Sequence[Read]] = [*self._tensors.units()]
        if self._objects:
            units += ((each,) for each in self._objects)
            units.sort(key=lambda unit: unit[0].item)
        self._items.read_units(units, entire)


def _coalesce(units: Iterable[Sequence[Read]]) -> Iterator[_Group]:
    """Yield units as groups, with small units next to each other joined."""
    found = [*units]
    items = [unit[0].item for unit in found]
    files, starts = [item.file for item in items], [item.offset for item in items]
    stops = [item.offset + item.length for item in items]
    small = [len(unit) == 1 and item.length <= SMALL_ITEM for unit, item in zip(found, items, strict=True)]
    for low, high in group_neighbours(files, starts, stops, small):
        reads = [each for unit in found[low:high] for each in unit]
        yield _Group(reads, files[low], starts[low], stops[high - 1], small[low])


def _run_job(job: tuple[int, Callable[[], None]]) -> None:
    job[1]()
