"""Compute the bytes that make a tensor's memory a ``torch.save`` archive: all but the payload, which is not copied.

The archive is an uncompressed zip of ``a/data.pkl``, ``a/version`` and ``a/data/0``: torch.load needs no more
(caffe2/serialize/inline_container.cc). The CRC of the payload is zero: torch never checks it, and the checkpoint has
its own digests; a file that stands alone gets it from :func:`shardckpt.archive.checksums.write_crcs`. Zip format:
APPNOTE.TXT 6.3, with the zip64 fields for 4 GiB and more.
"""

from __future__ import annotations

import functools
import io
import itertools
import math
import pickle
import struct
import sys
import zlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.archive.dtypes import STORAGE_NAMES
from shardckpt.archive.torch_private import rebuild_tensor_v2, rebuild_tensor_v3
from shardckpt.tensors.memory import LARGE, PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

#: Every archive begins at a multiple of this in its file, in bytes.
ARCHIVE_ALIGN = 64
_MAX32 = 0xFFFFFFFF
_MAX16 = 0xFFFF
_DATE = 0x21  # 1 January 1980, the zip epoch
_PADDING_ID = 0x4246  # "FB", as torch marks its own padding
_ZIP64_ID = 1

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL_CRC, _CENTRAL_CRC = 14, 16  # where the CRC-32 stands in these
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
    """Make the frame of an archive that will hold a contiguous tensor, and begin at ``position`` in its file, in bytes.

    Its head includes the padding before the payload, which is aligned to 64 bytes of the file. A payload of 1 MiB or
    more gets the same offset in its page of the file as its ``address`` has in its page of memory, so that direct I/O
    can write the pages without copying them.
    """
    head, nbytes, _ = _part_sizes(dtype, shape)
    align, start = ARCHIVE_ALIGN, 0
    if nbytes >= LARGE:
        align, start = PAGE, address if address % ARCHIVE_ALIGN == 0 else 0
    return _make_frame(dtype, shape, (start - position - head) % align)


def make_frame_of_length(dtype: torch.dtype, shape: tuple[int, ...], length: int) -> ArchiveFrame | None:
    """Make the frame of an archive of so many bytes, payload included: the inverse of :func:`make_frame`.

    It does without the position. None if :func:`make_frame` never makes an archive of that length.
    """
    gap = length - sum(_part_sizes(dtype, shape))
    return _make_frame(dtype, shape, gap) if 0 <= gap < PAGE else None


@functools.lru_cache(4096)
def _part_sizes(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return the sizes in bytes of the head without padding, the payload, and the tail."""
    head, tail = _new_frame(dtype, shape, 0)
    return len(head), math.prod(shape) * dtype.itemsize, len(tail)


def _make_frame(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> ArchiveFrame:
    # Only small gaps are cached: 4096 frames with gaps of up to a page would hold 16 MiB.
    return (_cached_frame if gap < ARCHIVE_ALIGN else _new_frame)(dtype, shape, gap)


def _new_frame(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> ArchiveFrame:
    nbytes = math.prod(shape) * dtype.itemsize
    leading, members = _leading_members(dtype, shape)
    # The payload is the last member: those before it depend only on dtype and shape, and are cached.
    payload = _Member(b"a/data/0", 0, nbytes, len(leading))
    extra = struct.pack("<HHQQ", _ZIP64_ID, 16, nbytes, nbytes) if nbytes >= _MAX32 else b""
    head = leading + _local_header(payload, extra + struct.pack("<HH", _PADDING_ID, gap) + bytes(gap))
    return ArchiveFrame(head, _tail((*members, payload), len(head) + nbytes))


_cached_frame = functools.lru_cache(4096)(_new_frame)


def make_plain_archive(value: Any) -> bytes:
    """Make the archive of plain values, without tensors; ``torch.save`` takes ten times as long."""
    head, members = _join_members((("data.pkl", pickle.dumps(value, protocol=2)), ("version", b"3\n")))
    return head + _tail(members, len(head))


class StateDictFrame(NamedTuple):
    """An archive of a value with many tensors, without their bytes.

    Attributes:
        parts: All other bytes, each with its offset, in the order of the file.
        starts: Where the bytes of each tensor begin, in the order in which the value was walked.
        crcs: Where the CRC-32 of each tensor belongs, twice: until these are written, there are zeros, which say that
            there is none.
    """

    parts: list[tuple[int, bytes]]
    starts: list[int]
    crcs: list[tuple[int, int]]


def make_state_dict_frame(value: Any, tensors: Sequence[DeclaredTensor]) -> StateDictFrame:
    """Make the bytes of an archive of a nested value, for tensors whose bytes are written later.

    The value has plain values, and tensors that are of ``tensors``: all of them, in the order in which their bytes are
    to be in the file. The bytes of each are aligned to 64 bytes of the file.
    """
    stubs = {id(tensor): _TensorStub(tensor.dtype, tensor.shape, str(n)) for n, tensor in enumerate(tensors)}
    pickled = io.BytesIO()
    _StatePickler(pickled, stubs).dump(value)
    parts: list[tuple[int, bytes]] = []
    starts: list[int] = []
    head, members = _join_members(
        (("data.pkl", pickled.getvalue()), ("byteorder", sys.byteorder.encode()), ("version", b"3\n"))
    )
    end = 0
    for number, tensor in enumerate(tensors):
        nbytes = tensor.nbytes
        member = _Member(f"a/data/{number}".encode(), 0, nbytes, end + len(head))
        members.append(member)
        extra = struct.pack("<HHQQ", _ZIP64_ID, 16, nbytes, nbytes) if nbytes >= _MAX32 else b""
        header = len(_local_header(member, extra)) + 4
        gap = -(end + len(head) + header) % ARCHIVE_ALIGN
        head += _local_header(member, extra + struct.pack("<HH", _PADDING_ID, gap) + bytes(gap))
        parts.append((end, head))
        starts.append(end + len(head))
        head, end = b"", starts[-1] + nbytes
    parts.append((end, head + _tail(members, end + len(head))))
    entries = list(itertools.accumulate((len(_directory_entry(member)) for member in members), initial=end + len(head)))
    crcs = [
        (member.offset + _LOCAL_CRC, entry + _CENTRAL_CRC)
        for member, entry in zip(members, entries, strict=False)
        if member.name.startswith(b"a/data/")
    ]
    return StateDictFrame(parts, starts, crcs)


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape, in elements."""
    return tuple(math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape)))


@functools.lru_cache(4096)
def _leading_members(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, tuple[_Member, ...]]:
    """Return the bytes of the members before the payload, and their directory entries."""
    pickled = io.BytesIO()
    _TensorPickler(pickled, protocol=2).dump(_TensorStub(dtype, shape))
    data, members = _join_members((("data.pkl", pickled.getvalue()), ("version", b"3\n")))
    return data, tuple(members)


def _join_members(contents: Iterable[tuple[str, bytes]]) -> tuple[bytes, list[_Member]]:
    """Return the bytes of an archive's first members, by name, and their directory entries."""
    data, members = b"", []
    for name, content in contents:
        member = _Member(f"a/{name}".encode(), zlib.crc32(content), len(content), len(data))
        members.append(member)
        data += _local_header(member, b"") + content
    return data, members


def _local_header(member: _Member, extra: bytes) -> bytes:
    return _LOCAL.pack(b"PK\x03\x04", *_common_fields(member, extra)) + member.name + extra


def _common_fields(member: _Member, extra: bytes) -> tuple[int, ...]:
    """Return the fields of a member's local header, all repeated by its directory entry."""
    size = min(member.size, _MAX32)  # the largest value says: see the zip64 field
    version = 20 if size < _MAX32 else 45
    return version, 0, 0, 0, _DATE, member.crc, size, size, len(member.name), len(extra)


def _tail(members: Sequence[_Member], start: int) -> bytes:
    """Return the central directory and the end records; the directory begins at ``start`` in the archive."""
    directory = b"".join(map(_directory_entry, members))
    count, size = len(members), len(directory)
    if start + size < _MAX32 and count < _MAX16:  # else the numbers do not fit the end record
        return directory + _END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0)
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
    short = min(count, _MAX16)
    return directory + end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _MAX32), _MAX32, 0)


def _directory_entry(member: _Member) -> bytes:
    large = [member.size, member.size] if member.size >= _MAX32 else []
    large += [member.offset] if member.offset >= _MAX32 else []
    extra = struct.pack(f"<HH{len(large)}Q", _ZIP64_ID, 8 * len(large), *large) if large else b""
    fields = _common_fields(member, extra)
    entry = _CENTRAL.pack(b"PK\x01\x02", fields[0], *fields, 0, 0, 0, 0, min(member.offset, _MAX32))
    return entry + member.name + extra


class _StorageStub(NamedTuple):
    """Pickles as a storage that is in another member of the archive."""

    kind: Any
    numel: int
    name: str = "0"


class _TensorStub(NamedTuple):
    """Pickles to the same bytes as a tensor of this dtype and shape, without any memory for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    storage: str = "0"

    def __reduce__(self) -> tuple[Any, ...]:
        numel = math.prod(self.shape)
        # Storage offset, shape, strides, requires_grad, hooks: the arguments of torch's function behind the storage.
        rest: tuple[Any, ...] = (0, self.shape, row_major_strides(self.shape), False, OrderedDict())
        name = STORAGE_NAMES.get(self.dtype)
        if name is not None:
            return rebuild_tensor_v2, (_StorageStub(getattr(torch, name), numel, self.storage), *rest)
        storage = _StorageStub(torch.UntypedStorage, numel * self.dtype.itemsize, self.storage)
        return rebuild_tensor_v3, (storage, *rest, self.dtype)


class DeclaredTensor(NamedTuple):
    """A tensor whose bytes are written later."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return ("storage", obj.kind, obj.name, "cpu", obj.numel) if isinstance(obj, _StorageStub) else None


class _StatePickler(_TensorPickler):
    """Pickles plain values, and a stub for each declared tensor."""

    def __init__(self, file: io.BytesIO, stubs: Mapping[int, _TensorStub]) -> None:
        super().__init__(file, protocol=2)
        self._stubs = stubs

    def reducer_override(self, obj: Any) -> Any:
        stub = self._stubs.get(id(obj))
        return NotImplemented if stub is None else stub.__reduce__()
