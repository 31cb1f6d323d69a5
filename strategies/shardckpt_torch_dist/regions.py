"""Reading a box of a stored tensor into a tensor: only the bytes that it spans, in bounded pieces."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.memory import is_plain, tensor_bytes
from shardckpt_torch_dist.archive import Archive, StoredPayload
from shardckpt_torch_dist.envelope import envelope, row_major

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt_torch_dist.stored import Chunk, Item

#: Bytes that may be read at once into memory that is not the destination's.
_PIECE = 16 << 20
#: Items up to this size are read whole, in one call.
SMALL_ITEM = 64 << 10


class _Place(NamedTuple):
    """Contiguous elements in a file."""

    reader: Source
    file: str
    offset: int
    dtype: torch.dtype
    key: str


class Source(Protocol):
    """What items are read from: a reader, or a run of a file that it has read ahead."""

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Bytes of a range."""

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill memory from a range."""


class ReadAhead:
    """A run of a file, read at once for the small items in it."""

    def __init__(self, reader: Source, span: Item) -> None:
        self._reader = reader
        self._file, self._offset, _ = span
        try:
            self._data = memoryview(reader.read_range(*span, "small items"))
        except CorruptCheckpointError:  # each item by itself, then: the damaged one is named
            self._data = memoryview(b"")

    def read_range(self, name: str, offset: int, nbytes: int, what: str) -> bytes:
        """Bytes of a range, from the run where they lie in it."""
        start = offset - self._offset
        if name == self._file and start >= 0 and start + nbytes <= len(self._data):
            return bytes(self._data[start : start + nbytes])
        return self._reader.read_range(name, offset, nbytes, what)

    def read_into(self, name: str, offset: int, buffer: memoryview, what: str) -> None:
        """Fill memory from a range."""
        self._reader.read_into(name, offset, buffer, what)


def read_chunk(
    reader: Source, chunk: Chunk, start: Sequence[int], target: torch.Tensor, dtype: torch.dtype, key: str
) -> None:
    """Read the box of the target's shape that begins at ``start`` in the chunk, casting to the target's dtype.

    Raises:
        CorruptCheckpointError: the archive is not the tensor that the metadata says.
    """
    item = chunk.item
    whole = reader.read_range(item.file, item.offset, item.length, key) if item.length <= SMALL_ITEM else None
    stored = _ours(reader, chunk, whole, dtype, key) or _archive(reader, item, whole, key).payload()
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
        if box.shape != target.shape:
            for axis, (first, length) in enumerate(zip(start, target.shape, strict=True)):
                box = box.narrow(axis, first, length)
        target.copy_(box)
        return
    first_byte = item.offset + stored.offset + (stored.first + chunk.first) * dtype.itemsize
    _read_box(_Place(reader, item.file, first_byte, dtype, key), chunk.box.shape, tuple(start), target)


def read_object(reader: Source, item: Item, key: str) -> bytes:
    """The bytes of an object's archive."""
    return reader.read_range(item.file, item.offset, item.length, key)


def _ours(reader: Source, chunk: Chunk, whole: bytes | None, dtype: torch.dtype, key: str) -> StoredPayload | None:
    """The payload of an archive that is, byte for byte, the one that we write; None for any other."""
    item, shape = chunk.item, chunk.box.shape
    head, tail = envelope(dtype, shape, item.offset)
    nbytes = chunk.box.volume * dtype.itemsize
    if chunk.first or item.length != len(head) + nbytes + len(tail):
        return None
    if whole is None:
        if reader.read_range(item.file, item.offset, len(head), key) != head:
            return None
    elif not (whole.startswith(head) and whole.endswith(tail)):
        return None
    return StoredPayload(dtype, shape, row_major(shape), 0, len(head), nbytes)


def _archive(reader: Source, item: Item, whole: bytes | None, key: str) -> Archive:
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


def _read_box(source: _Place, shape: tuple[int, ...], start: tuple[int, ...], target: torch.Tensor) -> None:
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


__all__ = ["SMALL_ITEM", "ReadAhead", "Source", "read_chunk", "read_object"]
