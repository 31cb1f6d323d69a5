"""Read planned items: regions of tensors by several threads, small neighbours at once, DCP's items by a planner."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.checkpoint.planner import LoadItemType

from shardckpt.errors import CorruptCheckpointError
from shardckpt.tensors import is_ordinary, synchronize_devices
from shardckpt_torch_dist.plan.coalesced_reads import ReadAhead, coalesce
from shardckpt_torch_dist.plan.regions import read_chunk
from shardckpt_torch_dist.plan.requested import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import Chunk, Item, StoredIndex
    from shardckpt_torch_dist.plan.coalesced_reads import CoalescedRead


class Destinations(Protocol):
    """Where items that are not regions go: the methods of a DCP load planner that are called while files are read."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the archive of an object."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that an item is read into."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that the tensor is filled."""


class ItemReader:
    """Reads regions and DCP's read items.

    Args:
        reader: The checkpoint's files.
        index: What they store.
        planner: Gives the destinations of DCP's items.
    """

    def __init__(self, reader: CheckpointReader, index: StoredIndex, planner: Destinations) -> None:
        self._reader = reader
        self._index = index
        self._planner = planner

    def read(self, units: Sequence[Sequence[Any]]) -> None:
        """Read units of items with several threads; the planner's methods must be thread-safe.

        Args:
            units: Lists of items that one thread must read together, in order.
        """
        self._reader.map(self._read_group, coalesce(units, self.locate), self._nbytes)

    def read_in_order(self, items: Sequence[ReadItem]) -> None:
        """Read items one after the other, all in this thread."""
        for group in coalesce([(item,) for item in items], self.locate):
            self._read_group(group)

    def locate(self, item: Region | ReadItem) -> Item:
        """Return where an item's archive is; to sort by it is to read each file from front to back."""
        if isinstance(item, Region):
            return item.chunk.item
        if item.type == LoadItemType.BYTE_IO:
            return self._index.archive(item.storage_index.fqn)
        return self.find_chunk(item).item

    def find_chunk(self, item: ReadItem) -> Chunk:
        """Return the chunk that a tensor item is read from.

        Raises:
            CorruptCheckpointError: It is not stored.
        """
        key, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        chunk = self._index.tensor(self._index.numbers[key]).chunks.get(offset)
        if chunk is None:
            raise CorruptCheckpointError(
                f"tensor {key!r}: its chunk at {offset} is listed but not stored: the save lost it"
            )
        return chunk

    def _nbytes(self, group: CoalescedRead) -> int:
        """Return the bytes to read for a group; small items count as 0: they cost Python's time, not the disk's."""
        if group.small:
            return 0
        return sum(item.target.nbytes if isinstance(item, Region) else self.locate(item).length for item in group.items)

    def _read_group(self, group: CoalescedRead) -> None:
        if not group.small or len(group.items) == 1:
            for item in group.items:
                self._read(item, None)
            return
        with ReadAhead(self._reader, group) as ahead:
            for item in group.items:
                if not (isinstance(item, Region) and self._takes_bytes(item) and ahead.copy(item)):
                    self._read(item, ahead)

    def _takes_bytes(self, region: Region) -> bool:
        """Return whether a region's target can be filled by a copy of all bytes of the stored tensor."""
        target = region.target
        return region.is_entire and target.dtype == self._index.dtypes[region.number] and is_ordinary(target)

    def _read(self, item: Region | ReadItem, ahead: ReadAhead | None) -> None:
        """Read an item, from memory if it was read ahead."""
        key = self._index.keys[item.number] if isinstance(item, Region) else item.storage_index.fqn
        archive = None if ahead is None else ahead.read_range(*self.locate(item), key)
        if isinstance(item, Region):
            dtype = self._index.dtypes[item.number]
            read_chunk(self._reader, item.chunk, item.start, item.target, dtype, key, archive)
            _synchronize(item.target)
            return
        if item.type == LoadItemType.BYTE_IO:
            archive = self._reader.read_range(*self.locate(item), key) if archive is None else archive
            self._planner.load_bytes(item, io.BytesIO(archive))
            return
        target = self._planner.resolve_tensor(item)
        dtype, start = self._index.dtypes[self._index.numbers[key]], tuple(item.storage_offsets)
        read_chunk(self._reader, self.find_chunk(item), start, target, dtype, key, archive)
        _synchronize(target)
        self._planner.commit_tensor(item, target)


def _synchronize(target: torch.Tensor) -> None:
    """Wait for copies to a device: this thread's stream is not the caller's."""
    if target.device.type != "cpu":
        synchronize_devices([target])
