"""Reading ``torch.save`` archives without ``torch.load``: a stored zip of one pickle and raw storages.

Format: torch/serialization.py and caffe2/serialize/inline_container.cc. The pickle goes through the allow-list, and
payloads are located, so that any range of a tensor can be read by itself.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt_torch_dist.dtypes import storage_dtype
from shardckpt_torch_dist.guards import Marker, Shield, shielded
from shardckpt_torch_dist.unpickle import load_object

ReadRange = Callable[[int, int], bytes]

_LOCAL_HEADER = struct.Struct("<4s22xHH")


class _RangeFile(io.RawIOBase):
    """A seekable file over a function that reads ranges."""

    def __init__(self, read_range: ReadRange, size: int) -> None:
        self._read_range = read_range
        self._size = size
        self._position = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._position))
        buffer[:count] = self._read_range(self._position, count)
        self._position += count
        return count


@dataclass(frozen=True)
class _Record:
    """A member of the zip: where its bytes are in the archive."""

    offset: int
    size: int


@dataclass(frozen=True)
class StoredPayload:
    """A tensor as an archive stores it.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides, in elements.
        first: Index of its first element in the storage.
        offset: Where the storage begins in the archive, in bytes.
        nbytes: Bytes of the storage.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    offset: int
    nbytes: int

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= size
        return True


class _StorageType(NamedTuple):
    """Stands for a storage class that a pickle names: its dtype, or None for bytes."""

    dtype: torch.dtype | None


@dataclass(frozen=True)
class _Storage:
    dtype: torch.dtype | None
    record: _Record


class Archive:
    """One ``torch.save`` archive.

    Args:
        read_range: Reads (offset, size) of the archive.
        size: Its size in bytes.
        source: Named in errors.
    """

    def __init__(self, read_range: ReadRange, size: int, source: str) -> None:
        self._read_range = read_range
        self._source = source
        self._records = self._directory(size)
        names = [name for name in self._records if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise CorruptCheckpointError(f"{source} is not a torch.save archive: it has no data.pkl")
        self._root = names[0][: -len("data.pkl")]
        order = self._records.get(self._root + "byteorder")
        if order is not None and self._bytes(order) != sys.byteorder.encode():
            raise CorruptCheckpointError(f"{source} was written on a machine of the other byte order")

    def payload(self) -> StoredPayload:
        """The one tensor of the archive, located but not read."""
        found = self._unpickle(_payload_global, ())
        if not isinstance(found, StoredPayload):
            raise CorruptCheckpointError(f"{self._source} holds a {type(found).__name__}, not a tensor")
        return found

    def load(self, allow_globals: Iterable[Any] = ()) -> Any:
        """The object of the archive."""
        storages: dict[int, torch.UntypedStorage] = {}

        def memory(record: _Record) -> torch.UntypedStorage:
            if record.offset not in storages:
                data = bytearray(self._bytes(record))
                values = (
                    torch.frombuffer(data, dtype=torch.uint8)
                    if data
                    else torch.empty(0, dtype=torch.uint8, device="cpu")
                )
                storages[record.offset] = values.untyped_storage()
            return storages[record.offset]

        rebuild = _TensorRebuilder(memory, allow_globals, self._source)
        return self._unpickle(rebuild.torch_global, allow_globals)

    def _unpickle(self, torch_global: Callable[[str, str], Any], allow_globals: Iterable[Any]) -> Any:
        def known(module: str, name: str) -> Any:
            dtype = storage_dtype(module, name)
            return torch_global(module, name) if dtype is False else _StorageType(dtype or None)

        pickled = self._bytes(self._records[self._root + "data.pkl"])
        return load_object(pickled, self._source, known, self._storage, allow_globals)

    def _storage(self, pid: Any) -> _Storage:
        kind, storage_type, key, _, numel = pid
        record = self._records.get(f"{self._root}data/{key}")
        if kind != "storage" or not isinstance(storage_type, _StorageType) or record is None:
            raise CorruptCheckpointError(f"{self._source}: its pickle refers to a storage that it does not have")
        itemsize = storage_type.dtype.itemsize if storage_type.dtype else 1
        if numel * itemsize > record.size:
            raise CorruptCheckpointError(f"{self._source}: a storage has {record.size} bytes, not {numel * itemsize}")
        return _Storage(storage_type.dtype, record)

    def _bytes(self, record: _Record) -> bytes:
        return self._read_range(record.offset, record.size)

    def _directory(self, size: int) -> dict[str, _Record]:
        file = io.BufferedReader(_RangeFile(self._read_range, size), 4096)
        try:
            with zipfile.ZipFile(file) as archive:
                records = {info.filename: self._located(info, size) for info in archive.infolist()}
        except (zipfile.BadZipFile, struct.error, NotImplementedError, ValueError) as exc:
            raise CorruptCheckpointError(f"{self._source} is not a torch.save archive: {exc}") from exc
        if sum(record.size for record in records.values()) > size:
            raise CorruptCheckpointError(f"{self._source}: its members are larger than itself: they overlap")
        return records

    def _located(self, info: zipfile.ZipInfo, size: int) -> _Record:
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(self._read_range(info.header_offset, 30))
        offset = info.header_offset + 30 + name_length + extra_length
        if magic != b"PK\x03\x04" or info.compress_type != zipfile.ZIP_STORED or offset + info.file_size > size:
            raise CorruptCheckpointError(f"{self._source}: member {info.filename!r} is compressed or out of bounds")
        return _Record(offset, info.file_size)


def load_bytes(data: bytes, source: str, allow_globals: Iterable[Any] = ()) -> Any:
    """The object of an archive in memory."""
    return Archive(lambda offset, size: data[offset : offset + size], len(data), source).load(allow_globals)


class _TensorRebuilder:
    """Our own versions of the functions that torch's pickles call to rebuild tensors: bounds are checked."""

    def __init__(
        self, memory: Callable[[_Record], torch.UntypedStorage], allow_globals: Iterable[Any], source: str
    ) -> None:
        self._memory = memory
        self._allow_globals = allow_globals
        self._source = source

    def torch_global(self, module: str, name: str) -> Any:
        """The function for a global of torch, or None."""
        functions: dict[tuple[str, str], Any] = {
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): _parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
            ("torch.storage", "_load_from_bytes"): self._nested,
            ("torch._tensor", "_rebuild_from_type_v2"): _of_type,
        }
        if (module, name) in (("torch", "Tensor"), ("torch.nn.parameter", "Parameter")):
            return Marker(f"{module}.{name}")
        function = functions.get((module, name))
        return function and shielded(function, copies=name == "_load_from_bytes")

    def _tensor(
        self, storage: _Storage, first: Any, shape: Any, stride: Any, grad: Any, _hooks: Any, *more: Any
    ) -> Any:
        found = _checked_payload(storage, first, shape, stride, more)
        memory = self._memory(storage.record)
        tensor = torch.empty(0, dtype=found.dtype, device="cpu").set_(memory, found.first, found.shape, found.stride)
        return tensor.requires_grad_(bool(grad)) if tensor.is_floating_point() or tensor.is_complex() else tensor

    def _nested(self, data: bytes) -> Any:
        return load_bytes(data, self._source, self._allow_globals)


def _of_type(function: Any, _type: Any, args: Any, _state: Any) -> torch.Tensor:
    """A tensor with attributes or of a subclass: the tensor alone."""
    if not isinstance(function, Shield) or type(args) is not tuple:
        raise CorruptCheckpointError(f"a tensor is rebuilt by {function!r}, which is none of torch's functions")
    tensor = function(*args)
    if not isinstance(tensor, torch.Tensor):
        raise CorruptCheckpointError(f"what is rebuilt as a tensor is a {type(tensor).__name__}")
    return tensor


def _parameter(data: torch.Tensor, requires_grad: bool, _hooks: Any, _state: Any = None) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _payload_global(module: str, name: str) -> Any:
    if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
        return shielded(_payload)
    return None


def _payload(
    storage: _Storage, first: Any, shape: Any, stride: Any, _grad: Any, _hooks: Any, *more: Any
) -> StoredPayload:
    return _checked_payload(storage, first, shape, stride, more)


def _checked_payload(storage: _Storage, first: int, shape: Any, stride: Any, more: tuple[Any, ...]) -> StoredPayload:
    """Where the tensor lies, once it is known to lie inside its storage."""
    if not isinstance(shape, (tuple, list)) or not isinstance(stride, (tuple, list)) or type(first) is not int:
        raise CorruptCheckpointError(f"a tensor of shape {shape!r:.80} with strides {stride!r:.80} does not exist")
    dtype = storage.dtype or next((value for value in more if isinstance(value, torch.dtype)), torch.uint8)
    shape, stride = tuple(map(int, shape)), tuple(map(int, stride))
    if len(shape) != len(stride) or first < 0 or any(value < 0 for value in (*shape, *stride)):
        raise CorruptCheckpointError(f"a tensor of shape {shape} with strides {stride} at {first} does not exist")
    last = first + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and (last + 1) * dtype.itemsize > storage.record.size:
        raise CorruptCheckpointError(f"a tensor of shape {shape} and {dtype} does not fit its storage")
    return StoredPayload(dtype, shape, stride, int(first), storage.record.offset, storage.record.size)


__all__ = ["Archive", "ReadRange", "StoredPayload", "load_bytes"]
