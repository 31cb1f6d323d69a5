"""Compute the bytes that make a tensor's memory a ``torch.save`` archive: all but the payload, which is not copied.

The archive is an uncompressed zip of ``a/data.pkl``, ``a/version`` and ``a/data/0``: torch.load needs no more
(caffe2/serialize/inline_container.cc). The CRC of the payload is zero: torch never checks it, and the checkpoint has
its own digests. Zip format: APPNOTE.TXT 6.3, with the zip64 fields for 4 GiB and more.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import struct
import zlib
from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from shardckpt.tensors import LARGE, PAGE
from shardckpt_torch_dist.archive.dtypes import storage_class_name
from shardckpt_torch_dist.torch_private import rebuild_tensor_v2, rebuild_tensor_v3

#: Every archive begins at a multiple of this in its file, in bytes.
ARCHIVE_ALIGN = 64
_MAX32 = 0xFFFFFFFF
_DATE = 0x21  # 1 January 1980, the zip epoch
_PADDING_ID = 0x4246  # "FB", as torch marks its own padding
_ZIP64_ID = 1

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR = struct.Struct("<4sIQI")


class ArchiveFrame(NamedTuple):
    """The bytes of an archive before the payload (head) and after it (tail)."""

    head: bytes
    tail: bytes


class _Member(NamedTuple):
    name: bytes
    crc: int
    size: int
    offset: int


def make_frame(dtype: torch.dtype, shape: tuple[int, ...], position: int, address: int = 0) -> ArchiveFrame:
    """Make the frame of an archive that will hold a contiguous tensor, for a position in a file.

    Args:
        dtype: The tensor's dtype.
        shape: Its shape.
        position: Where the archive will begin in its file, in bytes. The payload is aligned to 64 bytes of the file.
        address: Address of the tensor's memory. A payload of 1 MiB or more gets the same offset in its page of the file
            as in its page of memory, so that direct I/O can write the pages without copying them.

    Returns:
        The frame; its head includes the padding before the payload.
    """
    sizes = _part_sizes(dtype, shape)
    large = sizes.nbytes >= LARGE
    align, start = (PAGE, address if address % ARCHIVE_ALIGN == 0 else 0) if large else (ARCHIVE_ALIGN, 0)
    return _make_frame(dtype, shape, (start - position - sizes.head) % align)


def make_frame_of_length(dtype: torch.dtype, shape: tuple[int, ...], length: int) -> ArchiveFrame | None:
    """Make the frame of an archive of a known length: the inverse of :func:`make_frame`, without the position.

    Args:
        dtype: The tensor's dtype.
        shape: Its shape.
        length: Size of the archive with its payload, in bytes.

    Returns:
        The frame, or None if :func:`make_frame` never makes an archive of that length.
    """
    sizes = _part_sizes(dtype, shape)
    gap = length - sizes.head - sizes.nbytes - sizes.tail
    return _make_frame(dtype, shape, gap) if 0 <= gap < PAGE else None


class _PartSizes(NamedTuple):
    """Sizes in bytes of an archive's parts, without padding before the payload."""

    head: int
    nbytes: int
    tail: int


@functools.lru_cache(4096)
def _part_sizes(dtype: torch.dtype, shape: tuple[int, ...]) -> _PartSizes:
    head, tail = _new_frame(dtype, shape, 0)
    return _PartSizes(len(head), math.prod(shape) * dtype.itemsize, len(tail))


def _make_frame(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> ArchiveFrame:
    # Only small gaps are cached: 4096 frames with gaps of up to a page would hold 16 MiB.
    return _cached_frame(dtype, shape, gap) if gap < ARCHIVE_ALIGN else _new_frame(dtype, shape, gap)


@functools.lru_cache(4096)
def _cached_frame(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> ArchiveFrame:
    return _new_frame(dtype, shape, gap)


def _new_frame(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> ArchiveFrame:
    nbytes = math.prod(shape) * dtype.itemsize
    leading, members = _leading_members(dtype, shape)
    # The payload is the last member: those before it depend only on dtype and shape, and are cached.
    members = (*members, _Member(b"a/data/0", 0, nbytes, len(leading)))
    head = leading + _payload_header(nbytes, gap)
    return ArchiveFrame(head, _tail(members, len(head) + nbytes))


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


@functools.lru_cache(4096)
def _leading_members(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, tuple[_Member, ...]]:
    """Return the bytes of the members before the payload, and their directory entries."""
    data, members = b"", []
    for name, content in ((b"a/data.pkl", _pickle_tensor(dtype, shape)), (b"a/version", b"3\n")):
        member = _Member(name, zlib.crc32(content), len(content), len(data))
        members.append(member)
        data += _local_header(member, b"") + content
    return data, tuple(members)


def _payload_header(nbytes: int, gap: int) -> bytes:
    member = _Member(b"a/data/0", 0, nbytes, 0)
    extra = struct.pack("<HHQQ", _ZIP64_ID, 16, nbytes, nbytes) if nbytes >= _MAX32 else b""
    return _local_header(member, extra + struct.pack("<HH", _PADDING_ID, gap) + bytes(gap))


def _local_header(member: _Member, extra: bytes) -> bytes:
    wide = member.size >= _MAX32
    size = _MAX32 if wide else member.size
    version = 45 if wide else 20
    fields = (version, 0, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fields) + member.name + extra


def _tail(members: tuple[_Member, ...], start: int) -> bytes:
    """Return the central directory and the end records; the directory begins at ``start`` in the archive."""
    directory = b"".join(map(_directory_entry, members))
    count, size = len(members), len(directory)
    if start + size < _MAX32:
        return directory + _END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0)
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
    return directory + end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, count, count, size, _MAX32, 0)


def _directory_entry(member: _Member) -> bytes:
    wide = member.size >= _MAX32
    size = _MAX32 if wide else member.size
    extra = struct.pack("<HHQQ", _ZIP64_ID, 16, member.size, member.size) if wide else b""
    version = 45 if wide else 20
    lengths = (len(member.name), len(extra), 0, 0, 0, 0)
    fields = (version, version, 0, 0, 0, _DATE, member.crc, size, size, *lengths, member.offset)
    return _CENTRAL.pack(b"PK\x01\x02", *fields) + member.name + extra


def _pickle_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    _TensorPickler(file, protocol=2).dump(_TensorStub(dtype, shape))
    return file.getvalue()


class _StorageStub(NamedTuple):
    kind: Any
    numel: int


class _TensorStub:
    """Pickles to the same bytes as a tensor of this dtype and shape, without any memory for it."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        numel = math.prod(self._shape)
        place: tuple[Any, ...] = (0, self._shape, row_major_strides(self._shape), False, OrderedDict())
        name = storage_class_name(self._dtype)
        if name is not None:
            return rebuild_tensor_v2, (_StorageStub(getattr(torch, name), numel), *place)
        storage = _StorageStub(torch.UntypedStorage, numel * self._dtype.itemsize)
        return rebuild_tensor_v3, (storage, *place, self._dtype)


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.numel) if isinstance(obj, _StorageStub) else None


__all__ = ["ARCHIVE_ALIGN", "ArchiveFrame", "make_frame", "make_frame_of_length", "row_major_strides"]
