"""Reading a box of a stored tensor into a tensor: only the bytes that it spans, in bounded pieces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.memory import is_plain, tensor_bytes
from shardckpt_torch_dist.archive import Archive, StoredPayload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.storage.reader import CheckpointReader
    from shardckpt_torch_dist.stored import Chunk, Item

#: Bytes that may be read at once into memory that is not the destination's.
_PIECE = 16 << 20
#: Items up to this size are read whole, in one call.
_WHOLE = 64 << 10


class _Source(NamedTuple):
    """Contiguous elements in a file."""

    reader: CheckpointReader
    file: str
    offset: int
    dtype: torch.dtype
    key: str


def read_chunk(
    reader: CheckpointReader, chunk: Chunk, start: Sequence[int], target: torch.Tensor, dtype: torch.dtype, key: str
) -> None:
    """Read the box of the target's shape that begins at ``start`` in the chunk, casting to the target's dtype.

    Raises:
        CorruptCheckpointError: the archive is not the tensor that the metadata says.
    """
    item = chunk.item
    whole = reader.read_range(item.file, item.offset, item.length, key) if item.length <= _WHOLE else None
    stored = _archive(reader, item, whole, key).payload()
    if math.prod(stored.shape) != chunk.volume or stored.dtype != dtype:
        raise CorruptCheckpointError(
            f"{key}: {item.file} at {item.offset} holds {stored.dtype} {stored.shape}, the metadata says {dtype} and "
            f"{chunk.volume} elements"
        )
    if not target.numel():
        return
    if whole is not None or not stored.is_contiguous:
        raw = whole or reader.read_range(item.file, item.offset, item.length, key)
        flat = _tensor_in(raw, stored).reshape(-1)[chunk.first : chunk.first + chunk.box.volume]
        box = flat.view(chunk.box.shape)
        for axis, (first, length) in enumerate(zip(start, target.shape, strict=True)):
            box = box.narrow(axis, first, length)
        target.copy_(box)
        return
    first_byte = item.offset + stored.offset + (stored.first + chunk.first) * dtype.itemsize
    _read_box(_Source(reader, item.file, first_byte, dtype, key), chunk.box.shape, tuple(start), target)


def read_object(reader: CheckpointReader, item: Item, key: str) -> bytes:
    """The bytes of an object's archive."""
    return reader.read_range(item.file, item.offset, item.length, key)


def _archive(reader: CheckpointReader, item: Item, whole: bytes | None, key: str) -> Archive:
    def read(offset: int, nbytes: int) -> bytes:
        if whole is not None:
            return whole[offset : offset + nbytes]
        return reader.read_range(item.file, item.offset + offset, min(nbytes, item.length - offset), key)

    return Archive(read, item.length, f"{key}: {item.file} at {item.offset}")


def _tensor_in(raw: bytes, stored: StoredPayload) -> torch.Tensor:
    """The stored tensor as a view of the archive's bytes."""
    payload = bytearray(raw[stored.offset : stored.offset + stored.nbytes])
    values = torch.frombuffer(payload, dtype=stored.dtype)
    return values.as_strided(stored.shape, stored.stride, stored.first)


def _read_box(source: _Source, shape: tuple[int, ...], start: tuple[int, ...], target: torch.Tensor) -> None:
    """Read a box of a row-major tensor of ``shape``; a box that spans too many bytes is halved first."""
    steps = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    first = sum(index * step for index, step in zip(start, steps, strict=True))
    count = 1 + sum((length - 1) * step for length, step in zip(target.shape, steps, strict=True))
    offset = source.offset + first * source.dtype.itemsize
    in_place = target.device.type == "cpu" and target.dtype == source.dtype and is_plain(target)
    if in_place and target.is_contiguous() and count == target.numel():
        source.reader.read_into(source.file, offset, tensor_bytes(target), source.key)
        return
    axis = next((axis for axis, length in enumerate(target.shape) if length > 1), None)
    if axis is not None and count * source.dtype.itemsize > _PIECE:
        half = target.shape[axis] // 2
        second = (*start[:axis], start[axis] + half, *start[axis + 1 :])
        _read_box(source, shape, start, target.narrow(axis, 0, half))
        _read_box(source, shape, second, target.narrow(axis, half, target.shape[axis] - half))
        return
    buffer = torch.empty(count, dtype=source.dtype, device="cpu")
    source.reader.read_into(source.file, offset, tensor_bytes(buffer), source.key)
    target.copy_(buffer.as_strided(target.shape, steps))


__all__ = ["read_chunk", "read_object"]
