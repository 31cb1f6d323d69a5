"""Read what a load has planned: boxes of tensors in archives, in bounded pieces, and DCP's items by a planner."""

from __future__ import annotations

import functools
import io
import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.planner import LoadItemType

from shardckpt.archive import (
    Archive,
    StoredPayload,
    check_memory,
    make_frame_of_length,
    resolve_lazy_view,
    row_major_strides,
    summed,
)
from shardckpt.chunks import SMALL_ITEM, ItemReader
from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import RangeRead, StoredArray, read_box
from shardckpt.tensors import copy_values, synchronize_devices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.checkpoint.planner import ReadItem

    from shardckpt.chunks import Chunk, Item, ReadAhead
    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import StoredIndex


#: Archives whose heads are read at once; a head has up to 5 KiB.
_HEADS = 512


class Destinations(Protocol):
    """The destinations of items that are no regions: methods of a DCP load planner, called while files are read."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take the archive of an object."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor that an item is read into."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Note that the tensor is filled."""


class ArchiveReader(ItemReader):
    """Reads regions and DCP's read items; the planner's methods must be thread-safe, unless all is read in order."""

    index: StoredIndex

    def __init__(self, reader: CheckpointReader, index: StoredIndex, planner: Destinations) -> None:
        super().__init__(reader, index)
        self._planner = planner

    def find_payloads(self, chunks: Sequence[tuple[Chunk, torch.dtype, str]]) -> Iterator[int | None]:
        """Yield where the payload of each chunk begins, if its archive begins, byte for byte, as we write it.

        The heads of many archives are read at once, those that no digest tells.
        """
        for first in range(0, len(chunks), _HEADS):
            batch = chunks[first : first + _HEADS]
            archives = [
                build_own_archive(dtype, chunk.box.shape, chunk.item.length)
                if not chunk.first and chunk.volume == chunk.box.volume
                else None
                for chunk, dtype, _ in batch
            ]
            # most heads have a digest of their own, which says what they are: a store need not be asked for each
            known = [
                ours is not None and self.reader.is_known(chunk.item.file, chunk.item.offset, ours.head)
                for (chunk, _, _), ours in zip(batch, archives, strict=True)
            ]
            heads = [
                bytearray(len(ours.head) if ours and not is_known else 0)
                for ours, is_known in zip(archives, known, strict=True)
            ]
            self.reader.read_ranges(
                [
                    RangeRead(chunk.item.file, chunk.item.offset, memoryview(head), key)
                    for (chunk, _, key), head in zip(batch, heads, strict=True)
                    if head
                ]
            )
            for (chunk, _, _), ours, head, is_known in zip(batch, archives, heads, known, strict=True):
                yield chunk.item.offset + len(ours.head) if ours and (is_known or head == ours.head) else None

    def copy_chunk(self, chunk: Chunk, target: torch.Tensor, ahead: ReadAhead) -> bool:
        """Copy an entire chunk without parsing its archive, if that is, byte for byte, as we write it."""
        ours, data = build_own_archive(target.dtype, chunk.box.shape, chunk.item.length), ahead.view(chunk.item)
        if ours is None or data is None:
            return False
        head, tail, _ = ours
        payload, end = len(head), len(head) + target.nbytes
        if end + len(tail) != len(data) or data[:payload] != head or data[end:] != tail:
            return False
        ahead.copy(chunk.item.offset + payload, target)
        return True

    def read_chunk(
        self, chunk: Chunk, start: Sequence[int], target: torch.Tensor, dtype: torch.dtype, key: str, data: bytes | None
    ) -> None:
        """Read a box of a chunk; a CorruptCheckpointError if its archive is not the tensor that the metadata says."""
        item, archive, reader = chunk.item, data, self.reader
        # One read of a small archive, instead of one for its directory and one for its payload.
        if archive is None and item.length <= SMALL_ITEM:
            archive = reader.read_range(*item, key)

        def read(offset: int, nbytes: int) -> bytes:
            if archive is not None:
                return archive[offset : offset + nbytes]
            return reader.read_range(item.file, item.offset + offset, min(nbytes, item.length - offset), key)

        # An archive that is as we write it, byte for byte, is read without its pickle.
        ours = None if chunk.first else build_own_archive(dtype, chunk.box.shape, item.length)
        if ours and read(0, len(ours.head)) == ours.head and (archive is None or archive.endswith(ours.tail)):
            stored = ours.payload
        else:
            stored = Archive(read, item.length, f"{key}: {item.file} at {item.offset}").payload()
        if math.prod(stored.shape) != chunk.volume or stored.dtype != dtype:
            raise CorruptCheckpointError(
                f"{key}: {item.file} at {item.offset} holds {stored.dtype} {stored.shape}, the metadata says {dtype} "
                f"and {chunk.volume} elements"
            )
        if not target.numel():
            return
        if archive is None and stored.is_contiguous:
            first_byte = item.offset + stored.offset + (stored.first + chunk.first) * dtype.itemsize
            array = StoredArray(item.file, first_byte, dtype, tuple(chunk.box.shape))
            with summed(reader, item.file, stored, target.numel() * dtype.itemsize, key, item.offset) as source:
                read_box(source, array, tuple(start), target, key)
            return
        if archive is not None:
            payload = bytearray(archive[stored.offset : stored.offset + stored.nbytes])
            if reader.crcs != "none":
                check_memory(payload, stored.crc, f"{key}: {reader.directory / item.file} at {item.offset}: its values")
        else:  # with strides, the elements of a box may be anywhere in the storage
            payload = bytearray(stored.nbytes)
            with summed(reader, item.file, stored, stored.nbytes, key, item.offset) as source:
                source.read_into(item.file, item.offset + stored.offset, memoryview(payload), key)
        _copy_box(payload, stored, chunk, start, target)

    def locate_other(self, item: ReadItem) -> Item:
        """Return where an item's archive is."""
        if item.type == LoadItemType.BYTE_IO:
            return self.index.archive(item.storage_index.fqn)
        return self.find_chunk(item).item

    def find_chunk(self, item: ReadItem) -> Chunk:
        """Return the chunk that a tensor item is read from; if it is not stored, that is a CorruptCheckpointError."""
        key, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        chunk = self.index.tensor(self.index.numbers[key]).chunks.get(offset)
        if chunk is None:
            raise CorruptCheckpointError(
                f"tensor {key!r}: its chunk at {offset} is listed but not stored: the save lost it"
            )
        return chunk

    def read_other(self, item: ReadItem, ahead: ReadAhead | None) -> None:
        """Give an archive to the planner, or fill the tensor that it has for an item."""
        key, source = item.storage_index.fqn, self.reader if ahead is None else ahead
        if item.type == LoadItemType.BYTE_IO:
            self._planner.load_bytes(item, io.BytesIO(source.read_range(*self.locate_other(item), key)))
            return
        target, chunk = self._planner.resolve_tensor(item), self.find_chunk(item)
        dtype, start = self.index.dtypes[self.index.numbers[key]], tuple(item.storage_offsets)
        data = None if ahead is None else ahead.read_range(*chunk.item, key)
        self.read_chunk(chunk, start, target, dtype, key, data)
        synchronize_devices([target])
        self._planner.commit_tensor(item, target)


def _copy_box(
    payload: bytearray, stored: StoredPayload, chunk: Chunk, start: Sequence[int], target: torch.Tensor
) -> None:
    """Copy a box of a chunk from the bytes of its storage."""
    values = torch.frombuffer(payload, dtype=torch.uint8).view(stored.dtype)
    values = resolve_lazy_view(values.as_strided(stored.shape, stored.stride, stored.first), stored.lazy)
    box = values.reshape(-1)[chunk.first : chunk.first + chunk.box.volume].view(chunk.box.shape)
    if box.shape != target.shape:
        for axis, (first, length) in enumerate(zip(start, target.shape, strict=True)):
            box = box.narrow(axis, first, length)
    copy_values(target, box)


class OurArchive(NamedTuple):
    """An archive as we write it: the bytes before and after the payload, and where the payload is."""

    head: bytes
    tail: bytes
    payload: StoredPayload


@functools.lru_cache(1024)  # at most 4 MiB; the layers of a model repeat dtypes and shapes, and so does the next load
def build_own_archive(dtype: torch.dtype, shape: Ints, length: int) -> OurArchive | None:
    """Return the archive of ``length`` bytes that we would write for a tensor; None if we never write one so large."""
    frame = make_frame_of_length(dtype, shape, length)
    if frame is None:
        return None
    head, tail = frame
    payload = StoredPayload(dtype, shape, row_major_strides(shape), 0, len(head), length - len(head) - len(tail))
    return OurArchive(head, tail, payload)
