"""A storage reader for plain ``dcp.load``: only the bytes that are wanted, checked, right into the tensors."""

from __future__ import annotations

import dataclasses
import os
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardckpt.engine import directory_of, open_reader, reading
from shardckpt.errors import (
    CheckpointingException,
    CheckpointReplacedError,
    CorruptCheckpointError,
    ShardingError,
    UnsafePickleError,
)
from shardckpt.manifest import Manifest
from shardckpt.planning import refuse_cast
from shardckpt.storage import CheckpointReader, open_directory, retry_if_replaced
from shardckpt.tensors import synchronize_devices
from shardckpt_torch_dist.archive import brief, load_bytes, load_metadata
from shardckpt_torch_dist.dialects import INDEX_FILE, METADATA_FILE, STEPS, index_of, read_index, save_of
from shardckpt_torch_dist.load import TorchDistLoadShardedStrategy
from shardckpt_torch_dist.plan import Reads, Region, ShardedLoadPlanner, check_cast, dcp_tensor

if TYPE_CHECKING:
    import io
    from collections.abc import Callable, Iterable

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from shardckpt_torch_dist.dialects import StoredIndex

#: What every archive of torch.save begins with; what begins otherwise torch.load takes for a plain pickle.
_ARCHIVE_MAGIC = b"PK\x03\x04"


class CheckpointStorageReader(StorageReader):
    """``dcp.load(state, storage_reader=CheckpointStorageReader(path))``: ours, Megatron's and stock DCP's directories.

    Digests are checked where the checkpoint has them. Objects are handed to the planner, whose torch.load runs what
    they say, only if our own reader accepts them.

    Args:
        path: The checkpoint's directory or URL.
        allow_globals: Classes and functions that objects may name besides the plain ones; each by itself, or as
            (it, "module.name").
        allow_dtype_cast: As for :func:`shardckpt.dist_checkpointing.load`.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, allow_globals: Iterable[Any] = (), allow_dtype_cast: bool = False
    ) -> None:
        super().__init__()
        self._allow_cast = allow_dtype_cast
        self._path = os.fspath(path)
        self._allow = tuple(allow_globals)
        self._rank = 0
        self._opened: _Opened | None = None
        self._close: Callable[[], Any] = _nothing_open

    @property
    def checkpoint_id(self) -> str:
        """The path, for DCP's logs."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, perhaps from another path."""
        self._path = os.fspath(checkpoint_id) if checkpoint_id else self._path
        self._opened = None
        self._close()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """What is stored, at its true global shapes; where the bytes are is not in it.

        Args:
            *args: None that are known.
            **kwargs: ``rank``: read what this rank alone has saved (``use_collectives=False``), if there is no more.
        """
        return self._open(kwargs.get("rank")).metadata

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's arguments
        """Note the rank."""
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the save that it is of."""
        if self._opened is None or not self._opened.save or plan.storage_data is not None:
            return plan
        return dataclasses.replace(plan, storage_data=_OfSave(self._opened.save))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are.

        Raises:
            CheckpointReplacedError: ranks have opened different saves, because the checkpoint is being overwritten.
        """
        saves = {plan.storage_data for plan in plans if isinstance(plan.storage_data, _OfSave)}
        if len(saves) > 1:
            raise CheckpointReplacedError(
                f"{self._path} is being overwritten: the ranks have opened {len(saves)} different saves; call dcp.load "
                "again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items; they are there when this returns.

        Raises:
            CheckpointReplacedError: what the plan is of is gone, because another save has replaced it: call
                ``dcp.load`` again.
        """
        opened = self._opened or self._open(None)
        try:
            with reading(opened.reader, self._rank, "reading"):
                allow_cast = self._allow_cast or getattr(planner, "allow_dtype_cast", False)
                asked = _Asked(planner, opened.stored, self._allow, allow_cast=allow_cast)
                _read(plan.items, asked, opened.reader, opened.stored)
                opened.reader.check_unchanged()
        finally:
            self._opened = None
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether there is a directory, or a store that some plugin serves."""
        try:
            return directory_of(checkpoint_id).is_dir()
        except CheckpointingException:
            return False

    def _open(self, rank: int | None) -> _Opened:
        """Open the checkpoint, until all is read or this reader is gone."""
        self._close()
        self._opened = retry_if_replaced(lambda: _opened(self._path, rank), self._path)
        self._close = weakref.finalize(self, self._opened.reader.close)
        return self._opened


class _OfSave(NamedTuple):
    """What a plan says of the save that it is of, on its way to the coordinator."""

    save: str


class _Opened(NamedTuple):
    """A checkpoint whose metadata has been read.

    Attributes:
        reader: Its files.
        stored: What is in them.
        metadata: The same for DCP.
        save: What tells the save from every other; ``""`` where each rank has one of its own.
    """

    reader: CheckpointReader
    stored: StoredIndex
    metadata: Metadata
    save: str


def _nothing_open() -> None:
    """Nothing is to be closed."""


def _opened(path: str, rank: int | None) -> _Opened:
    """A checkpoint and its metadata; what one rank alone has saved only where there is nothing else.

    Files that are open can be read whatever replaces them. DCP plans once: so all are opened here, if they are few.
    """
    strategy = TorchDistLoadShardedStrategy()
    directory, name = directory_of(path), f"__{rank}{METADATA_FILE}"
    if rank is not None and not strategy.recognises(directory) and (directory / name).is_file():
        manifest = Manifest(backend=strategy.backend, version=strategy.version)
        reader = CheckpointReader(open_directory(directory), manifest)
    else:
        name = METADATA_FILE
        reader = open_reader(path, strategy)
    try:
        with reading(reader, rank or 0, "reading the metadata"):
            opened = _read_metadata(reader, name)
            reader.open_files(opened.stored.files)
    except BaseException:
        reader.close()
        raise
    return opened if name == METADATA_FILE else opened._replace(save="")


def _read_metadata(reader: CheckpointReader, name: str) -> _Opened:
    """The index, and the same as DCP's planners know it."""
    record = reader.manifest.record
    if record is not None and INDEX_FILE in (file.name for file in record.files):
        index = read_index(reader)
        tensors: dict[str, Any] = {key: dcp_tensor(index.tensor(number)) for key, number in index.numbers.items()}
        return _Opened(reader, index, _of(tensors, index.objects), record.self_digest)
    source = f"{reader.directory}/{name}"
    data = reader.read(name)
    raw = load_metadata(data, source)
    index = index_of(raw, source)
    reshaped = getattr(raw, "mcore_data", None) or {}  # Megatron's flattened shards, of which the index has true shapes
    tensors = {
        key: dcp_tensor(index.tensor(number)) if key in reshaped else _as_written(raw.state_dict_metadata[key])
        for key, number in index.numbers.items()
    }
    metadata = _of(tensors, index.named, _checked(getattr(raw, "planner_data", None), source))
    return _Opened(reader, index, metadata, save_of(reader, data))


def _of(tensors: dict[str, Any], objects: Iterable[str], paths: Any = None) -> Metadata:
    entries = {**tensors, **{key: BytesStorageMetadata() for key in objects}}
    return Metadata(state_dict_metadata=entries, planner_data=paths, storage_meta=StorageMeta())


def _as_written(entry: Any) -> TensorStorageMetadata:
    """A tensor with all chunks that the metadata names; where one is nowhere, reading it is the error."""
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in entry.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=entry.properties.dtype), torch.Size(entry.size), chunks)


def _checked(paths: Any, source: str) -> dict[str, tuple[str | int, ...]] | None:
    """The paths of keys in the saved state dict, if DCP can make a nest of them: an index is a place in a list."""
    if not isinstance(paths, dict):
        return None
    for key, path in paths.items():
        if (
            not isinstance(path, tuple)
            or len(path) > STEPS
            or not all(isinstance(part, str) or (type(part) is int and 0 <= part < len(paths)) for part in path)
        ):
            raise CorruptCheckpointError(f"{source}: {key!r} cannot be at {brief(path)} of a state dict")
    return paths


def _read(
    items: Iterable[ReadItem],
    asked: _Asked,
    reader: CheckpointReader,
    index: StoredIndex,
) -> None:
    """Read items into what the planner gives for them.

    A planner that does nothing when a tensor is committed gives the destinations themselves: those are filled side by
    side. Any other is asked for one tensor at a time, by this thread.
    """
    reads = Reads(reader, index, asked)
    for item in items:
        _check_stored(item, index)
    ordered = sorted(items, key=reads.place)
    if getattr(asked.planner.commit_tensor, "__func__", None) is not DefaultLoadPlanner.commit_tensor:
        reads.read_in_order(ordered)
        return
    reads.read_in_order([item for item in ordered if item.type == LoadItemType.BYTE_IO])
    regions = [_region(item, asked, index) for item in ordered if item.type != LoadItemType.BYTE_IO]
    synchronize_devices(region.target for region in regions)
    reads.read([(region,) for region in regions])


class _Asked:
    """A planner that is asked for destinations, and gets no archive or cast that our own reader refuses."""

    def __init__(
        self, planner: LoadPlanner, index: StoredIndex, allow_globals: tuple[Any, ...], *, allow_cast: bool
    ) -> None:
        self.planner = planner
        self._index = index
        self._allow = allow_globals
        self._allow_cast = allow_cast

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Hand an object's archive over."""
        if not isinstance(self.planner, ShardedLoadPlanner):  # which has an allow-list of its own
            _check_object(value.getvalue(), f"object {read_item.storage_index.fqn!r}", self._allow)
        self.planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to fill."""
        target = self.destination(read_item)
        synchronize_devices([target])
        return target

    def destination(self, item: ReadItem) -> torch.Tensor:
        """The tensor to fill, which may still be in use by its device."""
        target = self.planner.resolve_tensor(item).detach()
        _check_shape(target, item)
        key = item.storage_index.fqn
        stored = self._index.dtypes[self._index.numbers[key]]
        if not self._allow_cast:
            refuse_cast(key, stored, target.dtype)
        check_cast(key, stored, target.dtype)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is filled."""
        self.planner.commit_tensor(read_item, tensor)


def _check_object(archive: bytes, what: str, allow_globals: tuple[Any, ...]) -> None:
    if not archive.startswith(_ARCHIVE_MAGIC):
        raise UnsafePickleError(
            f"{what} is no archive of torch.save: the planner would take it for a pickle, and run what it says; "
            "nothing was run. Save it as a tensor or a plain value"
        )
    load_bytes(archive, what, allow_globals)


def _check_stored(item: ReadItem, index: StoredIndex) -> None:
    key, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
    if item.type != LoadItemType.BYTE_IO and offset not in index.tensor(index.numbers[key]).chunks:
        raise CorruptCheckpointError(f"tensor {key!r}: its chunk at {offset} is named and not stored: the save lost it")


def _region(item: ReadItem, asked: _Asked, index: StoredIndex) -> Region:
    """An item as a region of a stored chunk."""
    number = index.numbers[item.storage_index.fqn]
    chunk = index.tensor(number).chunks[tuple(item.storage_index.offset or ())]
    whole = tuple(item.lengths) == tuple(chunk.box.shape)
    return Region(number, chunk, tuple(item.storage_offsets), asked.destination(item), whole)


def _check_shape(target: torch.Tensor, item: ReadItem) -> None:
    if target.shape != item.lengths:
        raise ShardingError(
            f"tensor {item.dest_index.fqn!r}: the planner gave a destination of shape {tuple(target.shape)} for "
            f"{tuple(item.lengths)} elements"
        )


__all__ = ["CheckpointStorageReader"]
