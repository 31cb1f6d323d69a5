"""Writing a tensor as a ``torch.save`` archive around its own memory: everything but the payload is computed.

The archive is a stored zip of ``a/data.pkl``, ``a/version`` and ``a/data/0``, which is what torch.load asks for
(caffe2/serialize/inline_container.cc); the CRC of the payload is left zero, which torch never checks, because the
checkpoint has digests of its own. Zip: APPNOTE.TXT 6.3, with the zip64 fields for 4 GiB and more.
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
from shardckpt_torch_dist.archive.dtypes import storage_name
from shardckpt_torch_dist.torch_private import rebuild_tensor_v2, rebuild_tensor_v3

#: Where every archive begins in its file, in bytes.
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


class Envelope(NamedTuple):
    """What goes before and after the payload."""

    head: bytes
    tail: bytes


class _Member(NamedTuple):
    name: bytes
    crc: int
    size: int
    offset: int


def fitted(dtype: torch.dtype, shape: tuple[int, ...], position: int, address: int = 0) -> Envelope:
    """The archive around a contiguous tensor, for a place in a file.

    Args:
        dtype: The tensor's dtype.
        shape: Its shape.
        position: Where the archive will begin in its file, in bytes: the payload lies on a multiple of 64.
        address: Of the tensor's memory: a payload of 1 MiB or more lies in its page of the file as it does in its page
            of memory, so that the pages can be written as they are.
    """
    bare = _bare(dtype, shape)
    large = bare.nbytes >= LARGE
    align, start = (PAGE, address if address % ARCHIVE_ALIGN == 0 else 0) if large else (ARCHIVE_ALIGN, 0)
    return _made(dtype, shape, (start - position - bare.head) % align)


def of_length(dtype: torch.dtype, shape: tuple[int, ...], length: int) -> Envelope | None:
    """The archive of so many bytes, payload included, that :func:`fitted` makes somewhere; None if it makes none."""
    bare = _bare(dtype, shape)
    gap = length - bare.head - bare.nbytes - bare.tail
    return _made(dtype, shape, gap) if 0 <= gap < PAGE else None


class _Bare(NamedTuple):
    """Lengths of an archive's parts without a gap before the payload."""

    head: int
    nbytes: int
    tail: int


@functools.lru_cache(4096)
def _bare(dtype: torch.dtype, shape: tuple[int, ...]) -> _Bare:
    head, tail = _archive(dtype, shape, 0)
    return _Bare(len(head), math.prod(shape) * dtype.itemsize, len(tail))


def _made(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> Envelope:
    return _small(dtype, shape, gap) if gap < ARCHIVE_ALIGN else _archive(dtype, shape, gap)


@functools.lru_cache(4096)
def _small(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> Envelope:
    return _archive(dtype, shape, gap)


def _archive(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> Envelope:
    nbytes = math.prod(shape) * dtype.itemsize
    prefix, members = _prefix(dtype, shape)
    members = (*members, _Member(b"a/data/0", 0, nbytes, len(prefix)))
    head = prefix + _payload_header(nbytes, gap)
    return Envelope(head, _tail(members, len(head) + nbytes))


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor, in elements."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


@functools.lru_cache(4096)
def _prefix(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, tuple[_Member, ...]]:
    """The members before the payload, which depend on dtype and shape alone."""
    data, members = b"", []
    for name, content in ((b"a/data.pkl", _pickled(dtype, shape)), (b"a/version", b"3\n")):
        member = _Member(name, zlib.crc32(content), len(content), len(data))
        members.append(member)
        data += _local(member, b"") + content
    return data, tuple(members)


def _payload_header(nbytes: int, gap: int) -> bytes:
    member = _Member(b"a/data/0", 0, nbytes, 0)
    extra = struct.pack("<HHQQ", _ZIP64_ID, 16, nbytes, nbytes) if nbytes >= _MAX32 else b""
    return _local(member, extra + struct.pack("<HH", _PADDING_ID, gap) + bytes(gap))


def _local(member: _Member, extra: bytes) -> bytes:
    wide = member.size >= _MAX32
    size = _MAX32 if wide else member.size
    version = 45 if wide else 20
    fields = (version, 0, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra))
    return _LOCAL.pack(b"PK\x03\x04", *fields) + member.name + extra


def _tail(members: tuple[_Member, ...], start: int) -> bytes:
    """The central directory, which begins at ``start`` in the archive."""
    directory = b"".join(map(_central, members))
    count, size = len(members), len(directory)
    if start + size < _MAX32:
        return directory + _END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0)
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
    return directory + end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, count, count, size, _MAX32, 0)


def _central(member: _Member) -> bytes:
    wide = member.size >= _MAX32
    size = _MAX32 if wide else member.size
    extra = struct.pack("<HHQQ", _ZIP64_ID, 16, member.size, member.size) if wide else b""
    version = 45 if wide else 20
    lengths = (len(member.name), len(extra), 0, 0, 0, 0)
    fields = (version, version, 0, 0, 0, _DATE, member.crc, size, size, *lengths, member.offset)
    return _CENTRAL.pack(b"PK\x01\x02", *fields) + member.name + extra


def _pickled(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    _EnvelopePickler(file, protocol=2).dump(_TensorStub(dtype, shape))
    return file.getvalue()


class _StorageStub(NamedTuple):
    kind: Any
    numel: int


class _TensorStub:
    """Pickles as a tensor of the dtype and shape would, without having its memory."""

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape

    def __reduce__(self) -> tuple[Any, ...]:
        numel = math.prod(self._shape)
        place: tuple[Any, ...] = (0, self._shape, row_major(self._shape), False, OrderedDict())
        name = storage_name(self._dtype)
        if name is not None:
            return rebuild_tensor_v2, (_StorageStub(getattr(torch, name), numel), *place)
        storage = _StorageStub(torch.UntypedStorage, numel * self._dtype.itemsize)
        return rebuild_tensor_v3, (storage, *place, self._dtype)


class _EnvelopePickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, "0", "cpu", obj.numel) if isinstance(obj, _StorageStub) else None


__all__ = ["ARCHIVE_ALIGN", "Envelope", "fitted", "of_length", "row_major"]
