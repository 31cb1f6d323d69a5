"""Read a box of a stored tensor into a tensor: only the bytes that the box spans, in bounded pieces."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import Source as RangeSource
from shardckpt.storage import StoredArray, read_box
from shardckpt.tensors import copy_values
from shardckpt_torch_dist.archive import (
    Archive,
    StoredPayload,
    make_frame_of_length,
    resolve_lazy_view,
    row_major_strides,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning import Ints
    from shardckpt_torch_dist.dialects import Chunk, Item

#: Items up to this size, in bytes, are read entirely, in one call.
SMALL_ITEM = 64 << 10


class Source(RangeSource, Protocol):
    """What items are read from: a checkpoint reader, or a block that was read ahead."""

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Return the bytes of a range of a file."""


def read_chunk(
    reader: Source,
    chunk: Chunk,
    start: Sequence[int],
    target: torch.Tensor,
    dtype: torch.dtype,
    key: str,
    archive: bytes | None = None,
) -> None:
    """Read a box of a chunk into a tensor, with a cast to the tensor's dtype.

    Args:
        reader: Reads the files.
        chunk: The chunk.
        start: Where the box begins in the chunk, along each axis.
        target: The tensor to fill; its shape is the box's.
        dtype: The stored dtype.
        key: The tensor's key, for errors.
        archive: The bytes of the chunk's archive, if they were read already.

    Raises:
        CorruptCheckpointError: The archive is not the tensor that the metadata says.
    """
    item = chunk.item
    # One read of a small archive, instead of one for its directory and one for its payload.
    if archive is None and item.length <= SMALL_ITEM:
        archive = reader.read_range(item.file, item.offset, item.length, key)
    stored = _own_payload(reader, chunk, archive, dtype, key) or _open_archive(reader, item, archive, key).payload()
    if math.prod(stored.shape) != chunk.volume or stored.dtype != dtype:
        raise CorruptCheckpointError(
            f"{key}: {item.file} at {item.offset} holds {stored.dtype} {stored.shape}, the metadata says {dtype} and "
            f"{chunk.volume} elements"
        )
    if not target.numel():
        return
    if archive is not None or not stored.is_contiguous:
        flat = _load_tensor(reader, item, stored, archive, key).reshape(-1)
        box = flat[chunk.first : chunk.first + chunk.box.volume].view(chunk.box.shape)
        if box.shape != target.shape:
            for axis, (first, length) in enumerate(zip(start, target.shape, strict=True)):
                box = box.narrow(axis, first, length)
        copy_values(target, box)
        return
    first_byte = item.offset + stored.offset + (stored.first + chunk.first) * dtype.itemsize
    array = StoredArray(item.file, first_byte, dtype, tuple(chunk.box.shape))
    read_box(reader, array, tuple(start), target, key)


class OurArchive(NamedTuple):
    """An archive as we write it: the bytes before and after the payload, and where the payload is."""

    head: bytes
    tail: bytes
    payload: StoredPayload


@functools.lru_cache(1024)  # at most 4 MiB; the layers of a model repeat dtypes and shapes, and so does the next load
def build_own_archive(dtype: torch.dtype, shape: Ints, length: int) -> OurArchive | None:
    """Return the archive that we would write for a tensor.

    Args:
        dtype: The tensor's dtype.
        shape: Its shape.
        length: Size of the archive, in bytes.

    Returns:
        The archive, or None if we never write one of that size.
    """
    frame = make_frame_of_length(dtype, shape, length)
    if frame is None:
        return None
    head, tail = frame
    payload = StoredPayload(dtype, shape, row_major_strides(shape), 0, len(head), length - len(head) - len(tail))
    return OurArchive(head, tail, payload)


def read_object(reader: Source, item: Item, key: str) -> bytes:
    """Read an object's archive.

    Args:
        reader: Reads the files.
        item: Where the archive is.
        key: The object's key, for errors.

    Returns:
        The bytes of the archive.
    """
    return reader.read_range(item.file, item.offset, item.length, key)


def _own_payload(
    reader: Source, chunk: Chunk, archive: bytes | None, dtype: torch.dtype, key: str
) -> StoredPayload | None:
    """Return the payload if the archive is, byte for byte, as we write it (no pickle is read then); None otherwise."""
    item = chunk.item
    ours = build_own_archive(dtype, chunk.box.shape, item.length)
    if chunk.first or ours is None:
        return None
    if archive is None:
        is_ours = reader.read_range(item.file, item.offset, len(ours.head), key) == ours.head
    else:
        is_ours = archive.startswith(ours.head) and archive.endswith(ours.tail)
    return ours.payload if is_ours else None


def _open_archive(reader: Source, item: Item, archive: bytes | None, key: str) -> Archive:
    def read(offset: int, nbytes: int) -> bytes:
        if archive is not None:
            return archive[offset : offset + nbytes]
        return reader.read_range(item.file, item.offset + offset, min(nbytes, item.length - offset), key)

    return Archive(read, item.length, f"{key}: {item.file} at {item.offset}")


def _load_tensor(reader: Source, item: Item, stored: StoredPayload, archive: bytes | None, key: str) -> torch.Tensor:
    """Return the stored tensor, with its strides."""
    if archive is not None:
        payload = bytearray(archive[stored.offset : stored.offset + stored.nbytes])
    else:
        payload = bytearray(stored.nbytes)
        reader.read_into(item.file, item.offset + stored.offset, memoryview(payload), key)
    values = torch.frombuffer(payload, dtype=torch.uint8).view(stored.dtype)
    return resolve_lazy_view(values.as_strided(stored.shape, stored.stride, stored.first), stored.lazy)


__all__ = ["SMALL_ITEM", "OurArchive", "Source", "build_own_archive", "read_chunk", "read_object"]
