"""Read planned items: regions of tensors by several threads, small neighbours at once, DCP's items by a planner."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.checkpoint.planner import LoadItemType

from shardckpt.chunks import Region, StagedRegion, read_in_order, read_units
from shardckpt.errors import CorruptCheckpointError
from shardckpt.tensors import is_ordinary, synchronize_devices
from shardckpt_torch_dist.plan.regions import copy_chunk, find_payloads, read_chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.chunks import Chunk, Item, ReadAhead
    from shardckpt.storage import CheckpointReader, RangeRead
    from shardckpt_torch_dist.dialects import StoredIndex


class Destinations(Protocol):
    """The destinations of items that are no regions: methods of a DCP load planner, called while files are read."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the archive of an object."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that an item is read into."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that the tensor is filled."""


class ItemReader:
    """Reads regions and DCP's read items."""

    def __init__(self, reader: CheckpointReader, index: StoredIndex, planner: Destinations) -> None:
        self._reader = reader
        self._index = index
        self._planner = planner

    def read(self, units: Sequence[Sequence[Any]]) -> None:
        """Read units of items with several threads; the planner's methods must be thread-safe.

        A unit is a list of items that one thread must read together, in order.
        """
        read_units(self._reader, units, self.locate, self._nbytes, self._read, self._find_ranges)

    def read_in_order(self, items: Sequence[ReadItem]) -> None:
        """Read items one after the other, all in this thread."""
        read_in_order(self._reader, items, self.locate, self._read)

    def locate(self, item: Region | StagedRegion | ReadItem) -> Item:
        """Return where an item's archive is; to sort by it is to read each file from front to back."""
        if isinstance(item, Region | StagedRegion):
            return item.chunk.item
        if item.type == LoadItemType.BYTE_IO:
            return self._index.archive(item.storage_index.fqn)
        return self.find_chunk(item).item

    def find_chunk(self, item: ReadItem) -> Chunk:
        """Return the chunk that a tensor item is read from; if it is not stored, that is a CorruptCheckpointError."""
        key, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        chunk = self._index.tensor(self._index.numbers[key]).chunks.get(offset)
        if chunk is None:
            raise CorruptCheckpointError(
                f"tensor {key!r}: its chunk at {offset} is listed but not stored: the save lost it"
            )
        return chunk

    def _nbytes(self, item: Region | StagedRegion | ReadItem) -> int:
        return item.nbytes if isinstance(item, Region | StagedRegion) else self.locate(item).length

    def _find_ranges(self, items: Sequence[Region | StagedRegion | ReadItem]) -> list[RangeRead | None]:
        """Return the range of a file that fills each region as it is; None for those that are read another way."""
        keys, dtypes = self._index.keys, self._index.dtypes
        regions = [(n, item) for n, item in enumerate(items) if isinstance(item, Region)]
        chunks = [(region.chunk, dtypes[region.number], keys[region.number]) for _, region in regions]
        found: list[RangeRead | None] = [None] * len(items)
        for (n, region), payload in zip(regions, find_payloads(self._reader, chunks), strict=True):
            if payload is not None:
                found[n] = region.find_range(payload, dtypes[region.number], keys[region.number])
        return found

    def _read(self, item: Region | StagedRegion | ReadItem, ahead: ReadAhead | None) -> None:
        """Read an item, from memory if it was read ahead."""
        if isinstance(item, Region):
            self._read_region(item, ahead)
        elif isinstance(item, StagedRegion):
            self._read_region(item.resolve(), ahead)
            item.staged.commit()
        else:
            self._read_dcp_item(item, ahead)

    def _read_region(self, region: Region, ahead: ReadAhead | None) -> None:
        key, dtype = self._index.keys[region.number], self._index.dtypes[region.number]
        # its target may be filled by a copy of all bytes of the stored tensor
        takes_bytes = region.is_entire and region.target.dtype == dtype and is_ordinary(region.target)
        if ahead is not None and takes_bytes and copy_chunk(region.chunk, region.target, ahead):
            return
        archive = None if ahead is None else ahead.read_range(*region.chunk.item, key)
        read_chunk(self._reader, region.chunk, region.start, region.target, dtype, key, archive)
        synchronize_devices([region.target])  # this thread's stream is not the caller's

    def _read_dcp_item(self, item: ReadItem, ahead: ReadAhead | None) -> None:
        key = item.storage_index.fqn
        archive = None if ahead is None else ahead.read_range(*self.locate(item), key)
        if item.type == LoadItemType.BYTE_IO:
            archive = self._reader.read_range(*self.locate(item), key) if archive is None else archive
            self._planner.load_bytes(item, io.BytesIO(archive))
            return
        target = self._planner.resolve_tensor(item)
        dtype, start = self._index.dtypes[self._index.numbers[key]], tuple(item.storage_offsets)
        read_chunk(self._reader, self.find_chunk(item), start, target, dtype, key, archive)
        synchronize_devices([target])
        self._planner.commit_tensor(item, target)
