"""Read boxes of tensors in archives, in bounded pieces."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.archive import (
    Archive,
    StoredPayload,
    check_memory,
    make_frame_of_length,
    resolve_lazy_view,
    row_major_strides,
    summed,
)
from shardckpt.chunks import SMALL_ITEM, ItemReader, ReadAhead
from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import RangeRead, StoredArray, read_box
from shardckpt.tensors import copy_box, is_ordinary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.chunks import Chunk, FramedRegions, Region, RequestedTensors
    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointReader


#: Archives whose heads are read at once; a head has up to 5 KiB.
_HEADS = 512


class ArchiveReader(ItemReader):
    """Reads regions of tensors that are archives of ``torch.save``, each with a zip directory and a pickle."""

    def pop_contiguous(self, tensors: RequestedTensors) -> FramedRegions | None:
        """Remove and return small archives of ours, which need not be parsed; most of another library's are parsed."""
        return None if self.reader.manifest.record is None else tensors.pop_framed(_find_frames)

    def find_payloads(self, chunks: Sequence[tuple[Chunk, torch.dtype, str]]) -> Iterator[int | None]:
        """Yield where the payload of each chunk begins, if its archive begins, byte for byte, as we write it.

        The heads of many archives are read at once, except those that a digest confirms.
        """
        for first in range(0, len(chunks), _HEADS):
            batch = chunks[first : first + _HEADS]
            archives = [
                build_own_archive(dtype, chunk.box.shape, chunk.item.length)
                if not chunk.first and chunk.volume == chunk.box.volume
                else None
                for chunk, dtype, _ in batch
            ]
            # the digest of most heads shows their content: a store need not be asked for each
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

    def read_region(self, region: Region, dtype: torch.dtype, key: str, source: CheckpointReader | ReadAhead) -> None:
        """Fill a target; a CorruptCheckpointError if the archive is not the tensor that the metadata says."""
        takes_bytes = region.is_entire and region.target.dtype == dtype and is_ordinary(region.target)
        chunk, target, reader = region.chunk, region.target, self.reader
        item = chunk.item
        if isinstance(source, ReadAhead) and takes_bytes:  # without parsing the archive, if it is as we write it
            ours = build_own_archive(dtype, chunk.box.shape, item.length)
            end = item.offset + item.length
            if ours and source.copy_framed(item.offset, end, 0, target.nbytes, target.data_ptr(), ours.frame):
                return
        # One read of a small archive, instead of one for its directory and one for its payload.
        archive = source.read_range(*item, key) if item.length <= SMALL_ITEM else None
        stored = self._find_payload(chunk, dtype, key, archive)
        if not target.numel():
            return
        if archive is None and stored.is_contiguous:
            first_byte = item.offset + stored.offset + (stored.first + chunk.first) * dtype.itemsize
            array = StoredArray(item.file, first_byte, dtype, tuple(chunk.box.shape))
            with summed(reader, item.file, stored, target.numel() * dtype.itemsize, key, item.offset) as summing:
                read_box(summing, array, region.start, target, key)
            return
        if archive is not None:
            payload = bytearray(archive[stored.offset : stored.offset + stored.nbytes])
            if reader.crcs != "none":
                check_memory(payload, stored.crc, f"{key}: {reader.directory / item.file} at {item.offset}: its values")
        else:  # with strides, the elements of a box may be anywhere in the storage
            payload = bytearray(stored.nbytes)
            with summed(reader, item.file, stored, stored.nbytes, key, item.offset) as summing:
                summing.read_into(item.file, item.offset + stored.offset, memoryview(payload), key)
        _copy_from(payload, stored, chunk, region.start, target)

    def _find_payload(self, chunk: Chunk, dtype: torch.dtype, key: str, archive: bytes | None) -> StoredPayload:
        """Return where an archive, which may be in memory, has its tensor, and how: as the metadata says."""
        item, reader = chunk.item, self.reader

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
        return stored


def _copy_from(payload: bytearray, stored: StoredPayload, chunk: Chunk, start: Ints, target: torch.Tensor) -> None:
    """Copy a box of a chunk from the bytes of its storage."""
    values = torch.frombuffer(payload, dtype=torch.uint8).view(stored.dtype)
    values = resolve_lazy_view(values.as_strided(stored.shape, stored.stride, stored.first), stored.lazy)
    box = values.reshape(-1)[chunk.first : chunk.first + chunk.box.volume].view(chunk.box.shape)
    copy_box(box, start, target)


class OurArchive(NamedTuple):
    """An archive as we write it: the bytes before and after the payload, and where the payload is."""

    head: bytes
    tail: bytes
    payload: StoredPayload

    @property
    def frame(self) -> tuple[bytes, bytes]:
        """The bytes around the payload."""
        return self.head, self.tail


def _find_frames(
    dtypes: Sequence[torch.dtype], shapes: Sequence[Ints], lengths: Sequence[int]
) -> list[tuple[bytes, bytes] | None]:
    return [ours and ours.frame for ours in map(build_own_archive, dtypes, shapes, lengths)]


@functools.lru_cache(1024)  # at most 4 MiB; the layers of a model repeat dtypes and shapes, and so does the next load
def build_own_archive(dtype: torch.dtype, shape: Ints, length: int) -> OurArchive | None:
    """Return the archive of ``length`` bytes that we would write for a tensor; None if we never write one so large."""
    frame = make_frame_of_length(dtype, shape, length)
    if frame is None:
        return None
    head, tail = frame
    payload = StoredPayload(dtype, shape, row_major_strides(shape), 0, len(head), length - len(head) - len(tail))
    return OurArchive(head, tail, payload)
