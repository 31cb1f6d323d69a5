"""Share the reads of a load among threads: large items go straight into their targets, small ones are joined."""

from __future__ import annotations

from functools import partial
from operator import attrgetter
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

    from shardckpt.chunks.contiguous import ContiguousRegions, FramedRegions
    from shardckpt.chunks.stored import Chunk, ChunkIndex
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.storage.range_reads import RangeRead
    from shardckpt.storage.reader import CheckpointReader

#: Each has the ``item`` that it reads, and ``nbytes``.
ReadRequest: TypeAlias = Region | LateRegion | ObjectRead


class _Group(NamedTuple):
    """Requests that one thread serves in order: a caller's unit, or small requests next to each other in a file.

    The bytes ``start`` to ``stop`` of ``file`` are the bytes of all requests if they are small, else unused.
    """

    requests: Sequence[ReadRequest]
    file: str
    start: int
    stop: int
    is_small: bool


class _Job(NamedTuple):
    """A call that reads; another thread may do it where its bytes are worth that, see :class:`NeighbourRead`."""

    shared_bytes: int
    read: Callable[[], None]


class ItemReader:
    """Reads regions of stored tensors, and objects, with several threads: overridden methods must be thread-safe.

    The bytes of an item are the values of its chunk. A format that wraps them, as ``torch.save`` does, overrides
    :meth:`find_payloads`, :meth:`read_region` and :meth:`pop_contiguous`.

    Attributes:
        reader: Reads the files.
        index: The index of the stored items.
    """

    def __init__(self, reader: CheckpointReader, index: ChunkIndex) -> None:
        self.reader = reader
        self.index = index

    def find_payloads(self, chunks: Sequence[tuple[Chunk, torch.dtype, str]]) -> Iterable[int | None]:
        """Return the offset in its file of each chunk's payload; None if only :meth:`read_region` can find it.

        Each chunk comes with its stored dtype and its tensor's key.
        """
        return [chunk.item.offset if chunk.find_bytes(dtype) else None for chunk, dtype, _ in chunks]

    def pop_contiguous(self, tensors: RequestedTensors) -> ContiguousRegions | FramedRegions | None:
        """Remove and return the regions that :meth:`read_region` need not read one by one; None if there are none."""
        return tensors.pop_contiguous()

    def read_region(self, region: Region, dtype: torch.dtype, key: str, source: CheckpointReader | ReadAhead) -> None:
        """Fill the target of a region, with a cast if its dtype is not the stored one.

        ``source`` is the reader, or a :class:`ReadAhead` that has the item in memory with its small neighbours.
        """
        chunk, target = region.chunk, region.target
        found = chunk.find_bytes(dtype)
        if found is None:
            raise CorruptCheckpointError(
                f"{key}: the index claims {chunk.box.volume} elements of {dtype} from element {chunk.first} on of an "
                f"item of {chunk.item.length} bytes ({chunk.item.file} at {chunk.item.offset})"
            )
        file, (offset, nbytes) = chunk.item.file, found
        if not isinstance(source, ReadAhead):
            read_box(source, StoredArray(file, offset, dtype, chunk.box.shape), region.start, target, key)
        elif target.numel():
            data = bytearray(source.read_range(file, offset, nbytes, key))
            values = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(chunk.box.shape)
            copy_box(values, region.start, target)

    def read_units(
        self, units: Iterable[Sequence[ReadRequest]], contiguous: ContiguousRegions | FramedRegions | None = None
    ) -> None:
        """Serve units of requests, and read contiguous regions, with several threads.

        A unit is a list of requests that one thread must serve in order. Small requests are joined if their units have
        one request each and follow each other as in the file: sort units by their items. The error of a damaged item
        names it.
        """
        # most bytes are of large items that go into their targets as they are: these are ranges for all threads, and
        # the calling thread shares out the rest
        ranges, neighbours = ([], []) if contiguous is None else contiguous.plan_reads()
        large: list[tuple[_Group, Region]] = []
        others: list[_Group] = []
        for group in _group(units):
            first = group.requests[0]
            if len(group.requests) == 1 and not group.is_small and isinstance(first, Region):
                large.append((group, first))
            else:
                others.append(group)
        in_place = self._find_ranges([region for _, region in large])
        others += [group for (group, _), found in zip(large, in_place, strict=True) if found is None]
        jobs = [_Job(shared, partial(read, self.reader, self._serve)) for shared, read in neighbours]
        for group in others:
            # small items, each an object here, cost more of Python's time than of the disk's
            shared = 0 if group.is_small else sum(request.nbytes for request in group.requests)
            jobs.append(_Job(shared, partial(self._read_group, group)))
        read_others = (
            partial(self.reader.map, lambda job: job.read(), jobs, attrgetter("shared_bytes")) if jobs else None
        )
        try:
            self.reader.read_ranges([*ranges, *filter(None, in_place)], read_others)
        except CorruptCheckpointError:
            if contiguous is not None:  # the error of a range of several regions names the first: find the damaged one
                self.read_in_order(contiguous.list_joined())
            raise

    def read_in_order(self, requests: Iterable[ReadRequest]) -> None:
        """Serve one request after the other, all in this thread."""
        for group in _group((request,) for request in requests):
            self._read_group(group)

    def _find_ranges(self, regions: Sequence[Region]) -> list[RangeRead | None]:
        """Return for each region the range of a file whose bytes fill its target as they are, or None."""
        keys, dtypes = self.index.keys, self.index.dtypes
        chunks = [(region.chunk, dtypes[region.number], keys[region.number]) for region in regions]
        return [
            None if payload is None else region.find_range(payload, dtype, key)
            for region, payload, (_, dtype, key) in zip(regions, self.find_payloads(chunks), chunks, strict=True)
        ]

    def _read_group(self, group: _Group) -> None:
        if not group.is_small or len(group.requests) == 1:
            for request in group.requests:
                self._serve(request, self.reader)
            return
        with ReadAhead(self.reader, group.file, group.start, group.stop) as ahead:
            for request in group.requests:
                self._serve(request, ahead)

    def _serve(self, request: ReadRequest, source: CheckpointReader | ReadAhead) -> None:
        if isinstance(request, Region):
            self._fill(request, source)
        elif isinstance(request, ObjectRead):
            request.load(source.read_range(*request.item, request.what))
        else:
            target = request.get_target()
            self._fill(request.fill(target), source)
            request.commit(target)

    def _fill(self, region: Region, source: CheckpointReader | ReadAhead) -> None:
        self.read_region(region, self.index.dtypes[region.number], self.index.keys[region.number], source)
        if not region.target.is_cpu:  # most are, and a call takes as long as to copy a small one
            synchronize_devices([region.target])  # this thread's stream is not the caller's


class LoadPlan:
    """The reads of one rank's shards, checked before anything is read.

    Args:
        wanted: The shards: tensors with their destinations, and objects.
        items: Reads the checkpoint.
        find_object: Returns how an object is read, and raises if it is not stored.

    Raises:
        CheckpointingException: as for :class:`RequestedTensors`; ShardingError if a shard is of another class.
    """

    def __init__(
        self, wanted: Sequence[ShardedBase], items: ItemReader, find_object: Callable[[ShardedObject], ObjectRead]
    ) -> None:
        self._items = items
        tensors = [shard for shard in wanted if isinstance(shard, ShardedTensor)]
        self._tensors = RequestedTensors(tensors, items.index, items.reader)
        # isinstance of an ABC is slow, and most loads have tensors alone
        others = [] if len(tensors) == len(wanted) else [shard for shard in wanted if type(shard) is not ShardedTensor]
        self._objects: list[ObjectRead] = []
        for shard in others:
            if isinstance(shard, ShardedObject):
                self._objects.append(find_object(shard))
            elif not isinstance(shard, ShardedTensor):
                raise ShardingError(
                    f"{shard.key!r} is a {type(shard).__name__}: only tensors and objects can be loaded"
                )

    def read(self) -> None:
        """Read everything into the destinations."""
        contiguous = self._items.pop_contiguous(self._tensors)
        units: list[Sequence[ReadRequest]] = [*self._tensors.units()]
        if self._objects:
            units += ((request,) for request in self._objects)
            units.sort(key=lambda unit: unit[0].item)
        self._items.read_units(units, contiguous)


def _group(units: Iterable[Sequence[ReadRequest]]) -> Iterator[_Group]:
    """Yield a group for each unit, but one for all small units next to each other."""
    listed = [*units]
    items = [unit[0].item for unit in listed]
    files, starts = [item.file for item in items], [item.offset for item in items]
    stops = [item.offset + item.length for item in items]
    small = [len(unit) == 1 and item.length <= SMALL_ITEM for unit, item in zip(listed, items, strict=True)]
    for low, high, stop in group_neighbours(files, starts, stops, small):
        requests = [request for unit in listed[low:high] for request in unit]
        yield _Group(requests, files[low], starts[low], stop, small[low])
