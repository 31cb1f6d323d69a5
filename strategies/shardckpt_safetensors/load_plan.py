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
    from shardckpt.storage import CheckpointReader
    from shardckpt_safetensors.index import StoredIndex, StoredObject


class _ObjectRead(NamedTuple):
    """An object to read, and the shard that gets it."""

    shard: ShardedObject
    stored: StoredObject


class LoadPlan:
    """What one rank reads, checked before anything is read.

    Args:
        requested: The rank's shards.
        index: What is stored.
        reader: The checkpoint's files.

    Raises:
        CheckpointingException: A shard does not match what is stored, or the index contradicts itself.
    """

    def __init__(self, requested: Sequence[ShardedBase], index: StoredIndex, reader: CheckpointReader) -> None:
        self._index = index
        self._reader = reader
        self._tensors = RequestedTensors([s for s in requested if isinstance(s, ShardedTensor)], index, reader)
        self._objects: list[_ObjectRead] = []
        for shard in requested:
            if isinstance(shard, ShardedObject):
                self._objects.append(_ObjectRead(shard, index.take_object(shard.unique_key)))
            elif not isinstance(shard, ShardedTensor):
                raise ShardingError(
                    f"{shard.key!r} is a {type(shard).__name__}: only tensors and objects can be loaded"
                )

    def read(self) -> None:
        """Read everything into the destinations."""
        units: list[Sequence[Any]] = [*self._tensors.units()]
        # The reading threads have streams of their own: work of the caller's that uses the destinations must be done.
        synchronize_devices(item.target for unit in units for item in unit if isinstance(item, Region))
        units += ((item,) for item in self._objects)
        units.sort(key=lambda unit: _locate(unit[0]))
        read_units(self._reader, units, _locate, _nbytes, self._read)

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
        key, dtype = self._index.keys[region.number], self._index.dtypes[region.number]
        chunk, target = region.chunk, region.target
        if not target.numel():
            return
        if ahead is None:
            read_box(
                self._reader,
                StoredArray(chunk.item.file, chunk.item.offset, dtype, chunk.box.shape),
                region.start,
                target,
                key,
            )
        elif region.is_entire and target.dtype == dtype and is_ordinary(target) and ahead.view(chunk.item) is not None:
            ahead.copy(chunk.item.offset, target)
        else:
            payload = bytearray(ahead.read_range(*chunk.item, key))
            values = torch.frombuffer(payload, dtype=torch.uint8).view(dtype).view(chunk.box.shape)
            for axis, (first, length) in enumerate(zip(region.start, target.shape, strict=True)):
                values = values.narrow(axis, first, length)
            copy_values(target, values)
        if target.device.type != "cpu":
            synchronize_devices([target])  # this thread's stream is not the caller's


def _locate(item: Region | StagedRegion | _ObjectRead) -> Item:
    return item.stored.item if isinstance(item, _ObjectRead) else item.chunk.item


def _nbytes(item: Region | StagedRegion | _ObjectRead) -> int:
    return item.stored.item.length if isinstance(item, _ObjectRead) else item.nbytes
