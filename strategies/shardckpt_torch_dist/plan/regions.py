"""Reading a box of a stored tensor into a tensor: only the bytes that it spans, in bounded pieces."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage import Source as RangeSource
from shardckpt.storage import StoredArray, read_box
from shardckpt.tensors import copy_values
from shardckpt_torch_dist.archive import Archive, StoredPayload, of_length, resolved, row_major

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.planning import Ints
    from shardckpt_torch_dist.dialects import Chunk, Item

#: Items up to this size are read whole, in one call.
SMALL_ITEM = 64 << 10


class Source(RangeSource, Protocol):
    """What items are read from: a reader, or a run of a file that it has read ahead."""

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Bytes of a range."""


def read_chunk(
    reader: Source,
    chunk: Chunk,
    start: Sequence[int],
    target: torch.Tensor,
    dtype: torch.dtype,
    key: str,
    whole: bytes | None = None,
) -> None:
    """Read the box of the target's shape that begins at ``start`` in the chunk, casting to the target's dtype.

    ``whole`` is the chunk's archive, where it has been read already.

    Raises:
        CorruptCheckpointError: the archive is not the tensor that the metadata says.
    """
    item = chunk.item
    if whole is None and item.length <= SMALL_ITEM:
        whole = reader.read_range(item.file, item.offset, item.length, key)
    stored = _ours(reader, chunk, whole, dtype, key) or _archive(reader, item, whole, key).payload()
    if math.prod(stored.shape) != chunk.volume or stored.dtype != dtype:
        raise CorruptCheckpointError(
            f"{key}: {item.file} at {item.offset} holds {stored.dtype} {stored.shape}, the metadata says {dtype} and "
            f"{chunk.volume} elements"
        )
    if not target.numel():
        return
    if whole is not None or not stored.is_contiguous:
        flat = _tensor_in(reader, item, stored, whole, key).reshape(-1)[chunk.first : chunk.first + chunk.box.volume]
        box = flat.view(chunk.box.shape)
        if box.shape != target.shape:
            for axis, (first, length) in enumerate(zip(start, target.shape, strict=True)):
                box = box.narrow(axis, first, length)
        copy_values(target, box)
        return
    first_byte = item.offset + stored.offset + (stored.first + chunk.first) * dtype.itemsize
    array = StoredArray(item.file, first_byte, dtype, tuple(chunk.box.shape))
    read_box(reader, array, tuple(start), target, key)


class OurArchive(NamedTuple):
    """An archive as we write it: what is before and after the payload, and the payload."""

    head: bytes
    tail: bytes
    payload: StoredPayload


@functools.lru_cache(1024)  # at most 4 MiB: layers are alike, and so is the next load
def our_archive(dtype: torch.dtype, shape: Ints, length: int) -> OurArchive | None:
    """What we would have written around a tensor, in so many bytes with it; None for a length that we never write."""
    envelope = of_length(dtype, shape, length)
    if envelope is None:
        return None
    head, tail = envelope
    payload = StoredPayload(dtype, shape, row_major(shape), 0, len(head), length - len(head) - len(tail))
    return OurArchive(head, tail, payload)


def read_object(reader: Source, item: Item, key: str) -> bytes:
    """The bytes of an object's archive."""
    return reader.read_range(item.file, item.offset, item.length, key)


def _ours(reader: Source, chunk: Chunk, whole: bytes | None, dtype: torch.dtype, key: str) -> StoredPayload | None:
    """The payload of an archive that is, byte for byte, the one that we write; None for any other."""
    item = chunk.item
    ours = our_archive(dtype, chunk.box.shape, item.length)
    if chunk.first or ours is None:
        return None
    if whole is None:
        is_ours = reader.read_range(item.file, item.offset, len(ours.head), key) == ours.head
    else:
        is_ours = whole.startswith(ours.head) and whole.endswith(ours.tail)
    return ours.payload if is_ours else None


def _archive(reader: Source, item: Item, whole: bytes | None, key: str) -> Archive:
    def read(offset: int, nbytes: int) -> bytes:
        if whole is not None:
            return whole[offset : offset + nbytes]
        return reader.read_range(item.file, item.offset + offset, min(nbytes, item.length - offset), key)

    return Archive(read, item.length, f"{key}: {item.file} at {item.offset}")


def _tensor_in(reader: Source, item: Item, stored: StoredPayload, whole: bytes | None, key: str) -> torch.Tensor:
    """The stored tensor, with the strides that it was stored with."""
    if whole is not None:
        payload = bytearray(whole[stored.offset : stored.offset + stored.nbytes])
    else:
        payload = bytearray(stored.nbytes)
        reader.read_into(item.file, item.offset + stored.offset, memoryview(payload), key)
    values = torch.frombuffer(payload, dtype=torch.uint8).view(stored.dtype)
    return resolved(values.as_strided(stored.shape, stored.stride, stored.first), stored.lazy)


__all__ = ["SMALL_ITEM", "OurArchive", "Source", "our_archive", "read_chunk", "read_object"]
