"""Read ``torch.save`` archives without ``torch.load``: an uncompressed zip of one pickle and raw storages.

Format: torch/serialization.py and caffe2/serialize/inline_container.cc. The pickle goes through the allow-list. A
tensor's payload is located, not read, so that a load can read any range of it.
"""

from __future__ import annotations

import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError
from shardckpt_torch_dist.archive.tensor_pickles import Storage, TensorRebuilder, describe_one_tensor, unpickle
from shardckpt_torch_dist.archive.zip_directory import read_members

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardckpt_torch_dist.archive.zip_directory import Member, ReadRange


#: Bytes of nested archives that every archive may load, whatever its size.
_FREE = 64 << 10


class StoredPayload(NamedTuple):
    """Where an archive stores a tensor.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        stride: Its strides, in elements.
        first: Index of its first element in the storage.
        offset: Where the storage begins in the archive, in bytes.
        nbytes: Size of the storage, in bytes.
        lazy: The lazy view bits, ``conj`` and ``neg``, that are to be applied to the stored values.
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
        """Whether the stored values are the tensor's, in row-major order without gaps."""
        if self.lazy:
            return False
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected and 0 not in self.shape:
                return False
            expected *= size
        return True


class _NestedBudget:
    """Limits the bytes of nested archives that a pickle loads: it could load the same one any number of times."""

    def __init__(self, nbytes: int) -> None:
        self._left = _FREE + nbytes

    def spend(self, nbytes: int, source: str) -> None:
        """Count an archive; raise CorruptCheckpointError when an honest pickle could not have so many bytes."""
        self._left -= nbytes
        if self._left < 0:
            raise CorruptCheckpointError(f"{source}: its pickle loads nested archives too often")


class Archive:
    """One ``torch.save`` archive; only its directory is read at first.

    Args:
        read_range: Reads (offset, size) of the archive.
        size: Its size in bytes.
        source: Its name, for errors.

    Raises:
        CorruptCheckpointError: It is not a torch.save archive, is damaged, or has the other byte order.
    """

    def __init__(self, read_range: ReadRange, size: int, source: str) -> None:
        self._read_range = read_range
        self._source = source
        self._records = self._read_directory(size)
        names = [name for name in self._records if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise CorruptCheckpointError(f"{source} is not a torch.save archive: it has no data.pkl")
        self._root = names[0][: -len("data.pkl")]
        order = self._records.get(self._root + "byteorder")
        if order is not None and self._read_member(order) != sys.byteorder.encode():
            raise CorruptCheckpointError(f"{source} was written on a machine of the other byte order")

    def payload(self) -> StoredPayload:
        """Return where the archive's only tensor is, without reading its values.

        Raises:
            CorruptCheckpointError: The archive does not hold exactly one tensor, or it is damaged.
            UnsafePickleError: Its pickle names a global that no tensor needs.
        """
        try:
            storage, dtype, shape, stride, first, lazy = describe_one_tensor(self._read_pickle())
        except CheckpointingException as exc:
            raise type(exc)(f"{self._source}: {exc}") from exc
        record = self._find_record(storage)
        return StoredPayload(dtype, shape, stride, first, record.offset, record.size, lazy)

    def load(self, allow_globals: Iterable[Any] = (), nested: _NestedBudget | None = None) -> Any:
        """Load the archive's object.

        Args:
            allow_globals: Classes and functions that the pickle may name, in addition to the plain ones.
            nested: The budget of the outermost archive, if this one is nested in it; None if this is the outermost.

        Returns:
            The object, with its tensors on the CPU.

        Raises:
            UnsafePickleError: The pickle names a global outside the allow-list; nothing was run.
            CorruptCheckpointError: The archive is damaged.
        """
        budget = nested or _NestedBudget(2 * len(self._read_pickle()))
        storages: dict[int, torch.UntypedStorage] = {}

        def read_storage(record: Member) -> torch.UntypedStorage:
            if record.offset not in storages:
                data = bytearray(self._read_member(record))
                values = (
                    torch.frombuffer(data, dtype=torch.uint8)
                    if data
                    else torch.empty(0, dtype=torch.uint8, device="cpu")
                )
                storages[record.offset] = values.untyped_storage()
            return storages[record.offset]

        rebuild = TensorRebuilder(
            lambda storage: read_storage(self._find_record(storage)),
            lambda data: load_bytes(data, self._source, allow_globals, budget),
        )
        return unpickle(self._read_pickle(), self._source, rebuild.torch_global, allow_globals)

    def _read_pickle(self) -> bytes:
        return self._read_member(self._records[self._root + "data.pkl"])

    def _find_record(self, storage: Storage) -> Member:
        """Return the zip member that holds a storage."""
        record = self._records.get(f"{self._root}data/{storage.name}")
        if record is None:
            raise CorruptCheckpointError(f"{self._source}: its pickle refers to a storage that is missing")
        if storage.nbytes > record.size:
            raise CorruptCheckpointError(f"{self._source}: a storage has {record.size} bytes, not {storage.nbytes}")
        return record

    def _read_member(self, record: Member) -> bytes:
        return self._read_range(record.offset, record.size)

    def _read_directory(self, size: int) -> dict[str, Member]:
        try:
            records = read_members(self._read_range, size)
        except (ValueError, struct.error) as exc:
            raise CorruptCheckpointError(f"{self._source} is not a torch.save archive: {exc}") from exc
        # Overlapping members would let a small file fill the memory, each member with the same bytes.
        if sum(record.size for record in records.values()) > size:
            raise CorruptCheckpointError(f"{self._source}: its members are larger than the archive: they overlap")
        return records


def load_bytes(data: bytes, source: str, allow_globals: Iterable[Any] = (), nested: _NestedBudget | None = None) -> Any:
    """Load the object of a ``torch.save`` archive in memory; nothing outside the allow-list is run or imported.

    Args:
        data: The archive.
        source: Its name, for errors.
        allow_globals: Classes and functions that the pickle may name, in addition to plain values, tensors and numpy
            arrays; each by itself, or as (class or function, "module.name").
        nested: For internal use: the budget of the archive that holds this one.

    Returns:
        The object, with its tensors on the CPU.

    Raises:
        UnsafePickleError: The pickle names a global outside the allow-list.
        CorruptCheckpointError: The archive is damaged.
    """
    if nested is not None:
        nested.spend(len(data), source)
    return Archive(lambda offset, size: data[offset : offset + size], len(data), source).load(allow_globals, nested)


__all__ = ["Archive", "StoredPayload", "load_bytes"]
