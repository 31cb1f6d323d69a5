"""Reading ``torch.save`` archives without ``torch.load``: a stored zip of one pickle and raw storages.

Format: torch/serialization.py and caffe2/serialize/inline_container.cc. The pickle goes through the allow-list, and
payloads are located, so that any range of a tensor can be read by itself.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt_torch_dist.archive.tensor_pickles import Storage, TensorRebuilder, one_tensor, unpickle
from shardckpt_torch_dist.archive.zip_directory import members

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt_torch_dist.archive.zip_directory import Member, ReadRange


#: Bytes of nested archives that any archive may have.
_FREE = 64 << 10


class StoredPayload(NamedTuple):
    """A tensor as an archive stores it.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides, in elements.
        first: Index of its first element in the storage.
        offset: Where the storage begins in the archive, in bytes.
        nbytes: Bytes of the storage.
        lazy: ``conj`` and ``neg``, where the values are those of such a view.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    offset: int
    nbytes: int
    lazy: frozenset[str] = frozenset()

    @property
    def is_contiguous(self) -> bool:
        """Whether the values follow each other in row-major order, as they are."""
        if self.lazy:
            return False
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= size
        return True


class _Nested:
    """Counts the bytes of archives that a pickle holds as bytes: it may name the same ones again and again."""

    def __init__(self, nbytes: int) -> None:
        self._left = _FREE + nbytes

    def spend(self, nbytes: int, source: str) -> None:
        """Refuse more than there can be."""
        self._left -= nbytes
        if self._left < 0:
            raise CorruptCheckpointError(f"{source}: its pickle loads archives that it holds too often")


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
        try:
            storage, dtype, shape, stride, first, lazy = one_tensor(self._pickled())
        except CheckpointingException as exc:
            raise type(exc)(f"{self._source}: {exc}") from exc
        record = self._record(storage)
        return StoredPayload(dtype, shape, stride, first, record.offset, record.size, lazy)

    def load(self, allow_globals: Iterable[Any] = (), nested: _Nested | None = None) -> Any:
        """The object of the archive; ``nested``: what archives that lie in it as bytes may take, if it is one."""
        inner = nested or _Nested(2 * len(self._pickled()))
        storages: dict[int, torch.UntypedStorage] = {}

        def memory(record: Member) -> torch.UntypedStorage:
            if record.offset not in storages:
                data = bytearray(self._bytes(record))
                values = (
                    torch.frombuffer(data, dtype=torch.uint8)
                    if data
                    else torch.empty(0, dtype=torch.uint8, device="cpu")
                )
                storages[record.offset] = values.untyped_storage()
            return storages[record.offset]

        rebuild = TensorRebuilder(
            lambda storage: memory(self._record(storage)),
            lambda data: load_bytes(data, self._source, allow_globals, inner),
        )
        return unpickle(self._pickled(), self._source, rebuild.torch_global, allow_globals)

    def _pickled(self) -> bytes:
        return self._bytes(self._records[self._root + "data.pkl"])

    def _record(self, storage: Storage) -> Member:
        """The member that holds a storage."""
        record = self._records.get(f"{self._root}data/{storage.name}")
        if record is None:
            raise CorruptCheckpointError(f"{self._source}: its pickle refers to a storage that it does not have")
        if storage.nbytes > record.size:
            raise CorruptCheckpointError(f"{self._source}: a storage has {record.size} bytes, not {storage.nbytes}")
        return record

    def _bytes(self, record: Member) -> bytes:
        return self._read_range(record.offset, record.size)

    def _directory(self, size: int) -> dict[str, Member]:
        try:
            records = members(self._read_range, size)
        except (ValueError, struct.error) as exc:
            raise CorruptCheckpointError(f"{self._source} is not a torch.save archive: {exc}") from exc
        if sum(record.size for record in records.values()) > size:
            raise CorruptCheckpointError(f"{self._source}: its members are larger than itself: they overlap")
        return records


def load_bytes(data: bytes, source: str, allow_globals: Iterable[Any] = (), nested: _Nested | None = None) -> Any:
    """The object of an archive in memory, or in another one, of which ``nested`` says what it may take."""
    if nested is not None:
        nested.spend(len(data), source)
    return Archive(lambda offset, size: data[offset : offset + size], len(data), source).load(allow_globals, nested)


__all__ = ["Archive", "StoredPayload", "load_bytes"]
