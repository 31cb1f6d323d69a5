"""Read ``torch.save`` archives without ``torch.load``: an uncompressed zip of one pickle and raw storages.

Format: torch/serialization.py and caffe2/serialize/inline_container.cc. The pickle goes through the allow-list. A
tensor's payload is located, not read, so that a load can read any range of it.
"""

from __future__ import annotations

import logging
import struct
import sys
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive.checksums import check_member, check_memory
from shardckpt.archive.lazy_tensors import TensorDescriber
from shardckpt.archive.payload import StoredPayload
from shardckpt.archive.pickle_policy import has_stand_in
from shardckpt.archive.tensor_pickles import TensorRebuilder, describe_one_tensor, unpickle
from shardckpt.archive.zip_directory import CompressedError, read_members
from shardckpt.errors import CannotLoadError, CheckpointingException, CorruptCheckpointError, UnsafePickleError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Self

    from shardckpt.archive.tensor_pickles import Geometry, Storage
    from shardckpt.archive.zip_directory import Member, ReadRange
    from shardckpt.storage.reader import CheckpointReader

logger = logging.getLogger(__name__)

#: Bytes of nested archives that every archive may load, whatever its size.
_FREE = 64 << 10


class _NestedBudget:
    """Limits the bytes of nested archives that a pickle loads."""

    def __init__(self, nbytes: int) -> None:
        self._left = _FREE + nbytes  # a pickle could load the same archive any number of times

    def spend(self, nbytes: int, source: str) -> None:
        """Count an archive; raise CorruptCheckpointError when an honest pickle could not have so many bytes."""
        self._left -= nbytes
        if self._left < 0:
            raise CorruptCheckpointError(f"{source}: its pickle loads nested archives too often")


class Archive:
    """One ``torch.save`` archive; only its directory is read at first. ``source`` is its name, for errors.

    A file that is no such archive, is damaged, or has the other byte order is a CorruptCheckpointError; one whose
    members are compressed is a CannotLoadError.
    """

    def __init__(self, read_range: ReadRange, size: int, source: str) -> None:
        self._read_range = read_range
        #: Its name, for errors.
        self.source = source
        try:
            #: Where each of its files is, by name.
            self.members = read_members(read_range, size)
        except CompressedError as exc:
            raise CannotLoadError(
                f"{source} is a zip archive that torch.save did not write: {exc}. If torch.load reads it, save it anew "
                "by torch.save"
            ) from exc
        except (ValueError, struct.error) as exc:
            is_zip = read_range(0, min(size, 2)) == b"PK"
            what = "a zip archive that is cut short or damaged" if is_zip else "not a torch.save archive"
            why = "a record of its directory is not complete" if isinstance(exc, struct.error) else exc
            raise CorruptCheckpointError(f"{source} is {what}: {why}") from exc
        # Overlapping members would let a small file fill the memory, each member with the same bytes.
        if sum(member.size for member in self.members.values()) > size:
            raise CorruptCheckpointError(f"{source}: its members are larger than the archive: they overlap")
        names = [name for name in self.members if name.endswith("/data.pkl")]
        if len(names) != 1:
            raise CorruptCheckpointError(f"{source} is not a torch.save archive: it has no data.pkl")
        self._root = names[0][: -len("data.pkl")]
        order = self.members.get(self._root + "byteorder")
        if order is not None and read_range(order.offset, order.size) != sys.byteorder.encode():
            raise CorruptCheckpointError(f"{source} was written on a machine of the other byte order")

    @classmethod
    def of_file(cls, reader: CheckpointReader, name: str) -> Self:
        """Open an archive that is a file of a checkpoint."""
        size = reader.size(name)

        def read(offset: int, nbytes: int) -> bytes:
            return reader.read_range(name, offset, min(nbytes, size - offset), name)

        return cls(read, size, f"{reader.directory / name}")

    def check_members(self, reader: CheckpointReader, file: str, first: int = 0) -> None:
        """Read all members, and compare them with their CRC-32, if the reader is to check these.

        One that differs is a CorruptCheckpointError.
        """
        if reader.crcs == "none":
            return
        reader.note_crcs(file, all_members=all(member.crc or not member.size for member in self.members.values()))
        for name, member in self.members.items():
            check_member(reader, file, member._replace(offset=first + member.offset), f"{self.source}: {name!r}")

    def payload(self) -> StoredPayload:
        """Return where the archive's only tensor is, without reading its values.

        It is a CorruptCheckpointError if it does not hold exactly one tensor, an UnsafePickleError if its pickle names
        a global that no tensor needs.
        """
        try:
            geometry = describe_one_tensor(self._read_pickle())
        except CheckpointingException as exc:
            raise type(exc)(f"{self.source}: {exc}") from exc
        return self._locate(geometry)

    def describe(self, allow_globals: Iterable[Any] = ()) -> Any:
        """Load the archive's object, with a :class:`~shardckpt.archive.lazy_tensors.LazyTensor` for each tensor.

        It is an UnsafePickleError if the pickle names a global outside the allow-list; nothing was run.
        """
        describer = TensorDescriber(self._locate)
        return unpickle(self._read_pickle(), self.source, describer.torch_global, allow_globals)

    def load(
        self, allow_globals: Iterable[Any] = (), nested: _NestedBudget | None = None, *, to_save: bool = False
    ) -> Any:
        """Load the archive's object, with its tensors on the CPU.

        The pickle may name ``allow_globals``, in addition to the plain ones; if it names others, it is an
        UnsafePickleError, and nothing was run. ``nested`` is the budget of the outermost archive, if this one is nested
        in it. A storage outside of tensors has no values after a load: ``to_save`` it is an error, else a warning.
        ``to_save`` a class or function as a value, for which a load returns a stand-in, is an error, too.
        """
        pickled = self._read_pickle()
        # The bytes of nested archives are in the pickle: an honest one has each once.
        budget = nested or _NestedBudget(2 * len(pickled))
        storages: dict[int, torch.UntypedStorage] = {}

        def read_storage(storage: Storage) -> torch.UntypedStorage:
            member = self._find_storage(storage)
            if member.offset not in storages:  # tensors that share a storage share its memory again
                data = bytearray(self._read_range(member.offset, member.size))
                check_memory(data, member.crc, f"{self.source}: storage {storage.name!r}")
                # torch.frombuffer refuses an empty buffer.
                values = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, device="cpu")
                storages[member.offset] = values.untyped_storage()
            return storages[member.offset]

        rebuild = TensorRebuilder(read_storage, lambda data: load_bytes(data, self.source, allow_globals, budget))
        found = unpickle(pickled, self.source, rebuild.torch_global, allow_globals, rebuild.decode)
        if rebuild.loose_storages > 0:
            text = f"{self.source}: a storage of torch that no tensor is made of"
            if to_save:
                raise CheckpointingException(f"{text}: use a tensor")
            logger.warning("%s, without its values: older saves accepted it", text)
        if to_save and has_stand_in(found):
            error = UnsafePickleError(
                f"{self.source}: a class or function as a value, for which a load would return a stand-in, whatever "
                "is allowed: give its name as text"
            )
            error.can_be_allowed = False
            raise error
        return found

    def _read_pickle(self) -> bytes:
        member = self.members[self._root + "data.pkl"]
        pickled = self._read_range(member.offset, member.size)
        check_memory(pickled, member.crc, f"{self.source}: 'data.pkl'")
        return pickled

    def _locate(self, geometry: Geometry) -> StoredPayload:
        """Return where a tensor's values are in the archive."""
        storage, dtype, shape, stride, first, lazy = geometry
        member = self._find_storage(storage)
        return StoredPayload(dtype, shape, stride, first, member.offset, member.size, lazy, member.crc)

    def _find_storage(self, storage: Storage) -> Member:
        """Return the zip member that holds a storage."""
        member = self.members.get(f"{self._root}data/{storage.name}")
        if member is None:
            raise CorruptCheckpointError(f"{self.source}: its pickle refers to a storage that is missing")
        if storage.nbytes > member.size:
            raise CorruptCheckpointError(f"{self.source}: a storage has {member.size} bytes, not {storage.nbytes}")
        return member


def load_bytes(
    data: bytes,
    source: str,
    allow_globals: Iterable[Any] = (),
    nested: _NestedBudget | None = None,
    *,
    to_save: bool = False,
) -> Any:
    """Load the object of a ``torch.save`` archive in memory; nothing outside the allow-list is run or imported.

    Its tensors are on the CPU. The pickle may name ``allow_globals``, in addition to plain values, tensors and numpy
    arrays; each by itself, or as (class or function, "module.name"). Others are an UnsafePickleError. ``nested`` is the
    budget of the archive that holds this one; ``to_save`` as for :meth:`Archive.load`.
    """
    if nested is not None:
        nested.spend(len(data), source)
    archive = Archive(lambda offset, size: data[offset : offset + size], len(data), source)
    return archive.load(allow_globals, nested, to_save=to_save)
