"""Plan what a rank reads, and read it: regions of tensors by several threads, small neighbours at once, objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.chunks import Region, RequestedTensors, StagedRegion, read_units
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.storage import StoredArray, read_box
from shardckpt.tensors import copy_values, is_ordinary, synchronize_devices
from shardckpt_safetensors.objects import decode_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.chunks import Item, ReadAhead
    from shardckpt.mapping import ShardedBase
    from shardckpt.storage import CheckpointReader, RangeRead
    from shardckpt_safetensors.index import StoredIndex, StoredObject


class _ObjectRead(NamedTuple):
    """An object to read, and the shard that gets it."""

    shard: ShardedObject
    stored: StoredObject


class LoadPlan:
    """The reads of one rank, checked before anything is read."""

    def __init__(self, requested: Sequence[ShardedBase], index: StoredIndex, reader: CheckpointReader) -> None:
        self._index = index
        self._reader = reader
        self._tensors = RequestedTensors([s for s in requested if isinstance(s, ShardedTensor)], index, reader)
        self._objects: list[_ObjectRead] = []
        for shard in requested:
            if type(shard) is ShardedTensor:  # most are, and to ask whether one is an object is slow
                continue
            if isinstance(shard, ShardedObject):
                self._objects.append(_ObjectRead(shard, index.find_object(shard.unique_key)))
            elif not isinstance(shard, ShardedTensor):
                raise ShardingError(
                    f"{shard.key!r} is a {type(shard).__name__}: only tensors and objects can be loaded"
                )

    def read(self) -> None:
        """Read everything into the destinations."""
        entire = self._tensors.split_entire()
        units: list[Sequence[Any]] = [*self._tensors.units()]
        if self._objects:
            units += ((item,) for item in self._objects)
            units.sort(key=lambda unit: _locate(unit[0]))
        read_units(self._reader, units, _locate, _nbytes, self._read, self._find_ranges, entire)

    def _find_ranges(self, items: Sequence[Region | StagedRegion | _ObjectRead]) -> list[RangeRead | None]:
        """Return the range of a file that fills each region as it is; None for those that are read another way."""
        keys, dtypes = self._index.keys, self._index.dtypes
        return [
            item.find_range(item.chunk.item.offset, dtypes[item.number], keys[item.number])
            if isinstance(item, Region)
            else None
            for item in items
        ]

    def _read(self, item: Region | StagedRegion | _ObjectRead, ahead: ReadAhead | None) -> None:
        """Read an item, from memory if it was read ahead."""
        if isinstance(item, Region):
            self._read_region(item, ahead)
        elif isinstance(item, StagedRegion):
            self._read_region(item.resolve(), ahead)
            item.staged.commit()
        else:
            what = f"object {item.shard.unique_key!r}"
            source = self._reader if ahead is None else ahead
            item.shard.data = decode_object(item.stored.codec, source.read_range(*item.stored.item, what), what)

    def _read_region(self, region: Region, ahead: ReadAhead | None) -> None:
        chunk, target, dtype = region.chunk, region.target, self._index.dtypes[region.number]
        takes_bytes = region.is_entire and target.dtype == dtype and is_ordinary(target)
        if takes_bytes and ahead is not None and ahead.view(chunk.item) is not None:  # most are small
            ahead.copy(chunk.item.offset, target)
            return
        if not target.numel():
            return
        key = self._index.keys[region.number]
        if ahead is None:
            stored = StoredArray(chunk.item.file, chunk.item.offset, dtype, chunk.box.shape)
            read_box(self._reader, stored, region.start, target, key)
        else:
            payload = bytearray(ahead.read_range(*chunk.item, key))
            values = torch.frombuffer(payload, dtype=torch.uint8).view(dtype).view(chunk.box.shape)
            for axis, (first, length) in enumerate(zip(region.start, target.shape, strict=True)):
                values = values.narrow(axis, first, length)
            copy_values(target, values)
        synchronize_devices([target])  # this thread's stream is not the caller's


def _locate(item: Region | StagedRegion | _ObjectRead) -> Item:
    return item.stored.item if isinstance(item, _ObjectRead) else item.chunk.item


def _nbytes(item: Region | StagedRegion | _ObjectRead) -> int:
    return item.stored.item.length if isinstance(item, _ObjectRead) else item.nbytes
