"""Planned items read: regions of tensors by several threads, small neighbours at once, others as a planner says."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.checkpoint.planner import LoadItemType

from shardckpt.tensors import is_ordinary, synchronize_devices
from shardckpt_torch_dist.plan.coalesced_reads import ReadAhead, runs
from shardckpt_torch_dist.plan.regions import read_chunk, read_object
from shardckpt_torch_dist.plan.requested import Region

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import Item, StoredIndex, StoredTensor
    from shardckpt_torch_dist.plan.coalesced_reads import Run


class Destinations(Protocol):
    """Where items go that are no regions; the part of a DCP load planner that is asked while files are read."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object's archive."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor that an item is read into."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """That tensor has been filled."""


class Reads:
    """Reads regions, and DCP's items.

    Args:
        reader: The checkpoint's files.
        index: What they store.
        planner: Takes the items.
    """

    def __init__(self, reader: CheckpointReader, index: StoredIndex, planner: Destinations) -> None:
        self._reader = reader
        self._index = index
        self._planner = planner

    def read(self, units: Sequence[Sequence[Any]]) -> None:
        """Read units of items that belong together, by several threads; the planner must bear that."""
        self._reader.map(self._read_run, runs(units, self.place), self._nbytes)

    def read_in_order(self, items: Sequence[Any]) -> None:
        """Read items one after the other, all by this thread."""
        for run in runs([(item,) for item in items], self.place):
            self._read_run(run)

    def place(self, item: Region | ReadItem) -> Item:
        """Where an item's archive is; places sort by file and offset, to read files from front to back."""
        if isinstance(item, Region):
            return item.chunk.item
        if item.type == LoadItemType.BYTE_IO:
            return self._index.archive(item.storage_index.fqn)
        return self._stored(item).chunks[tuple(item.storage_index.offset or ())].item

    def _nbytes(self, run: Run) -> int:
        """Bytes that are wanted of a run; small items count as none: they cost Python's time, not the disk's."""
        if run.small:
            return 0
        return sum(item.target.nbytes if isinstance(item, Region) else self.place(item).length for item in run.items)

    def _stored(self, item: ReadItem) -> StoredTensor:
        return self._index.tensor(self._index.numbers[item.storage_index.fqn])

    def _read_run(self, run: Run) -> None:
        if not run.small or len(run.items) == 1:
            for item in run.items:
                self._read(item, None)
            return
        with ReadAhead(self._reader, run) as ahead:
            for item in run.items:
                if not (isinstance(item, Region) and self._copied(item, ahead)):
                    self._read(item, ahead)

    def _copied(self, region: Region, ahead: ReadAhead) -> bool:
        """Whether a whole chunk could be copied as its bytes are."""
        target = region.target
        if not region.whole or target.dtype != self._index.dtypes[region.number] or not is_ordinary(target):
            return False
        return ahead.copy(region.chunk.item, region.chunk.box.shape, target)

    def _read(self, item: Region | ReadItem, ahead: ReadAhead | None) -> None:
        """Read an item; one of a run that was read ahead from there."""
        key = self._index.keys[item.number] if isinstance(item, Region) else item.storage_index.fqn
        whole = None if ahead is None else ahead.read_range(*self.place(item), key)
        if isinstance(item, Region):
            dtype = self._index.dtypes[item.number]
            read_chunk(self._reader, item.chunk, item.start, item.target, dtype, key, whole)
            _settle(item.target)
            return
        if item.type == LoadItemType.BYTE_IO:
            archive = read_object(self._reader, self._index.archive(key), key) if whole is None else whole
            self._planner.load_bytes(item, io.BytesIO(archive))
            return
        tensor = self._stored(item)
        target = self._planner.resolve_tensor(item)
        chunk = tensor.chunks[tuple(item.storage_index.offset or ())]
        read_chunk(self._reader, chunk, tuple(item.storage_offsets), target, tensor.dtype, key, whole)
        _settle(target)
        self._planner.commit_tensor(item, target)


def _settle(target: torch.Tensor) -> None:
    """Wait for copies to a device: this thread's stream is not the caller's."""
    if target.device.type != "cpu":
        synchronize_devices([target])


__all__ = ["Destinations", "Reads"]
