"""Plan what a rank reads, and read it: regions of tensors by several threads, small neighbours at once, objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.chunks import ItemReader, RequestedTensors
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.storage import StoredArray, read_box
from shardckpt.tensors import copy_values
from shardckpt_safetensors.objects import decode_object

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.chunks import Chunk, Item, ReadAhead
    from shardckpt.mapping import ShardedBase
    from shardckpt.storage import CheckpointReader
    from shardckpt_safetensors.index import StoredIndex, StoredObject


class _ObjectRead(NamedTuple):
    """An object to read, and the shard that gets it."""

    shard: ShardedObject
    stored: StoredObject


class LoadPlan(ItemReader):
    """The reads of one rank, checked before anything is read."""

    def __init__(self, requested: Sequence[ShardedBase], index: StoredIndex, reader: CheckpointReader) -> None:
        super().__init__(reader, index)
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
            units.sort(key=lambda unit: self.locate(unit[0]))
        self.read_units(units, entire)

    def find_payloads(self, chunks: Sequence[tuple[Chunk, torch.dtype, str]]) -> list[int]:
        """Return where the payload of each chunk begins in its file: where its item does."""
        return [chunk.item.offset for chunk, _, _ in chunks]

    def copy_chunk(self, chunk: Chunk, target: torch.Tensor, ahead: ReadAhead) -> bool:
        """Copy an entire chunk from what was read ahead, if it is there."""
        if not ahead:
            return False
        ahead.copy(chunk.item.offset, target)
        return True

    def read_chunk(
        self, chunk: Chunk, start: Sequence[int], target: torch.Tensor, dtype: torch.dtype, key: str, data: bytes | None
    ) -> None:
        """Read a box of a chunk, whose item is its values."""
        if not target.numel():
            return
        if data is None:
            stored = StoredArray(chunk.item.file, chunk.item.offset, dtype, chunk.box.shape)
            read_box(self.reader, stored, tuple(start), target, key)
            return
        values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(chunk.box.shape)
        for axis, (first, length) in enumerate(zip(start, target.shape, strict=True)):
            values = values.narrow(axis, first, length)
        copy_values(target, values)

    def locate_other(self, item: _ObjectRead) -> Item:
        """Return where an object is."""
        return item.stored.item

    def read_other(self, item: _ObjectRead, ahead: ReadAhead | None) -> None:
        """Read an object."""
        what, source = f"object {item.shard.unique_key!r}", self.reader if ahead is None else ahead
        item.shard.data = decode_object(item.stored.codec, source.read_range(*item.stored.item, what), what)
