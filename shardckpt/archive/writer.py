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
import operator
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
#: Stand for a tensor's numbers in the pickle that is cut: this and the next ones, which no other part of it has.
_FIRST_PLACEHOLDER = 1 << 40

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
    parts = _make_parts(dtype, shape)
    align, start = ARCHIVE_ALIGN, 0
    if parts.payload.size >= LARGE:
        align, start = PAGE, address if address % ARCHIVE_ALIGN == 0 else 0
    return _make_frame(dtype, shape, (start - position - parts.head_size) % align)


def make_frame_of_length(dtype: torch.dtype, shape: tuple[int, ...], length: int) -> ArchiveFrame | None:
    """Make the frame of an archive of so many bytes, payload included: the inverse of :func:`make_frame`.

    It does without the position. None if :func:`make_frame` never makes an archive of that length.
    """
    parts = _make_parts(dtype, shape)
    gap = length - parts.head_size - parts.payload.size - parts.tail_size
    most = PAGE if parts.payload.size >= LARGE else ARCHIVE_ALIGN
    return _make_frame(dtype, shape, gap) if 0 <= gap < most else None


class _FrameParts(NamedTuple):
    """A frame without its padding: the parts that follow from dtype and shape alone.

    Attributes:
        leading: The bytes of the members before the payload.
        payload: The payload, the last member.
        directory: The central directory.
        head_size: Bytes of the head without padding.
        tail_size: Bytes of the tail.
    """

    leading: bytes
    payload: _Member
    directory: bytes
    head_size: int
    tail_size: int

    def pad(self, gap: int) -> ArchiveFrame:
        """Return the frame with so many bytes of padding before the payload."""
        padding = struct.pack("<HH", _PADDING_ID, gap) + bytes(gap)
        head = self.leading + _local_header(self.payload, _zip64_sizes(self.payload.size) + padding)
        return ArchiveFrame(head, self.directory + _end_records(3, len(self.directory), len(head) + self.payload.size))


@functools.lru_cache(4096)
def _make_parts(dtype: torch.dtype, shape: tuple[int, ...]) -> _FrameParts:
    """Return a frame's parts; the sizes are without padding."""
    leading, members = _join_members((("data.pkl", _pickle_tensor(dtype, shape)), ("version", b"3\n")))
    payload = _Member(b"a/data/0", 0, math.prod(shape) * dtype.itemsize, len(leading))
    directory = b"".join(map(_directory_entry, (*members, payload)))
    without = _FrameParts(leading, payload, directory, 0, 0).pad(0)
    return _FrameParts(leading, payload, directory, *map(len, without))


def _make_frame(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> ArchiveFrame:
    # Only small gaps are cached: 4096 frames with gaps of up to a page would hold 16 MiB.
    return _cached_frame(dtype, shape, gap) if gap < ARCHIVE_ALIGN else _make_parts(dtype, shape).pad(gap)


@functools.lru_cache(4096)
def _cached_frame(dtype: torch.dtype, shape: tuple[int, ...], gap: int) -> ArchiveFrame:
    return _make_parts(dtype, shape).pad(gap)


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
    stubs = {
        id(tensor): _TensorStub(tensor.dtype, _list_numbers(tensor.dtype, tensor.shape), str(n))
        for n, tensor in enumerate(tensors)
    }
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
        extra = _zip64_sizes(nbytes)
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
    if not shape:
        return ()
    return tuple(itertools.accumulate((max(size, 1) for size in shape[:0:-1]), operator.mul, initial=1))[::-1]


def _pickle_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Pickle a tensor: the pickle of any other of its dtype and number of dimensions, with its own numbers."""
    first, *others = _cut_pickle(dtype, len(shape))
    numbers = map(_pickle_int, _list_numbers(dtype, shape))
    return first + b"".join(itertools.chain.from_iterable(zip(numbers, others, strict=True)))


@functools.lru_cache(256)
def _cut_pickle(dtype: torch.dtype, ndim: int) -> tuple[bytes, ...]:
    """Return the pickle of a tensor, cut where its numbers are."""
    numbers = tuple(range(_FIRST_PLACEHOLDER, _FIRST_PLACEHOLDER + 1 + 2 * ndim))
    pickled = io.BytesIO()
    _TensorPickler(pickled, protocol=2).dump(_TensorStub(dtype, numbers))
    rest, pieces = pickled.getvalue(), []
    for number in numbers:
        piece, _, rest = rest.partition(_pickle_int(number))
        pieces.append(piece)
    return (*pieces, rest)


def _pickle_int(number: int) -> bytes:
    return pickle.dumps(number, protocol=2)[2:-1]  # without the protocol and the end


def _list_numbers(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers in a tensor's pickle: the elements of its storage, its shape, its strides."""
    numel = math.prod(shape)
    return (numel if dtype in STORAGE_NAMES else numel * dtype.itemsize, *shape, *row_major_strides(shape))


def _join_members(contents: Iterable[tuple[str, bytes]]) -> tuple[bytes, list[_Member]]:
    """Return the bytes of an archive's first members, by name, and their directory entries."""
    data, members = b"", []
    for name, content in contents:
        member = _Member(f"a/{name}".encode(), zlib.crc32(content), len(content), len(data))
        members.append(member)
        data += _local_header(member, b"") + content
    return data, members


def _zip64_sizes(nbytes: int) -> bytes:
    """Return the extra field of a local header whose sizes do not fit it."""
    return struct.pack("<HHQQ", _ZIP64_ID, 16, nbytes, nbytes) if nbytes >= _MAX32 else b""


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
    return directory + _end_records(len(members), len(directory), start)


def _end_records(count: int, size: int, start: int) -> bytes:
    """Return the records behind a central directory of so many members and bytes."""
    if start + size < _MAX32 and count < _MAX16:  # else the numbers do not fit the end record
        return _END.pack(b"PK\x05\x06", 0, 0, count, count, size, start, 0)
    end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, 45, 45, 0, 0, count, count, size, start)
    locator = _LOCATOR.pack(b"PK\x06\x07", 0, start + size, 1)
    short = min(count, _MAX16)
    return end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, _MAX32), _MAX32, 0)


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
    """Pickles to the same bytes as a tensor of this dtype, without any memory for it; numbers: `_list_numbers`."""

    dtype: torch.dtype
    numbers: tuple[int, ...]
    storage: str = "0"

    def __reduce__(self) -> tuple[Any, ...]:
        numel, *numbers = self.numbers
        shape, strides = tuple(numbers[: len(numbers) // 2]), tuple(numbers[len(numbers) // 2 :])
        # Storage offset, shape, strides, requires_grad, hooks: the arguments of torch's function behind the storage.
        rest: tuple[Any, ...] = (0, shape, strides, False, OrderedDict())
        name = STORAGE_NAMES.get(self.dtype)
        if name is not None:
            return rebuild_tensor_v2, (_StorageStub(getattr(torch, name), numel, self.storage), *rest)
        return rebuild_tensor_v3, (_StorageStub(torch.UntypedStorage, numel, self.storage), *rest, self.dtype)


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
