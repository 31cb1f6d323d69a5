"""A storage reader for plain ``dcp.load``: only the bytes that are wanted, checked, right into the tensors."""

from __future__ import annotations

import os
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

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, ShardingError, UnsafePickleError
from shardckpt.hosted import directory_of, find, reading
from shardckpt.manifest import Manifest
from shardckpt.storage.memory import synchronize_devices
from shardckpt_torch_dist.archive import load_bytes
from shardckpt_torch_dist.dialects import METADATA_FILE, STEPS, index_of, read_index
from shardckpt_torch_dist.guards import brief
from shardckpt_torch_dist.index_file import INDEX_FILE
from shardckpt_torch_dist.load import TorchDistLoadShardedStrategy
from shardckpt_torch_dist.load_plan import dcp_tensor
from shardckpt_torch_dist.load_planner import ShardedLoadPlanner, check_cast
from shardckpt_torch_dist.reads import Reads
from shardckpt_torch_dist.unpickle import load_metadata
from shardckpt_torch_dist.wanted import Region

if TYPE_CHECKING:
    import io
    from collections.abc import Iterable
    from pathlib import Path

    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem

    from shardckpt.storage.reader import CheckpointReader
    from shardckpt_torch_dist.stored import StoredIndex

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
    """

    def __init__(self, path: str | os.PathLike[str], *, allow_globals: Iterable[Any] = ()) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._allow = tuple(allow_globals)
        self._rank = 0
        self._opened: _Opened | None = None

    @property
    def checkpoint_id(self) -> str:
        """The path, for DCP's logs."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, perhaps from another path."""
        self._path = os.fspath(checkpoint_id) if checkpoint_id else self._path
        self._opened = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002 - DCP's signature
        """What is stored, at its true global shapes; where the bytes are is not in it.

        Args:
            *args: None that are known.
            **kwargs: ``rank``: read what this rank alone has saved (``use_collectives=False``), if there is no more.
        """
        self._opened, metadata = _open(self._path, kwargs.get("rank"))
        return metadata

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's arguments
        """Note the rank."""
        self._rank = kwargs.get("rank") or 0

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items; they are there when this returns."""
        opened = self._opened or _open(self._path, None)[0]
        with reading(opened.directory, opened.manifest, self._rank, "reading") as reader:
            _read(plan.items, planner, reader, opened.stored, self._allow)
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


class _Opened(NamedTuple):
    """A checkpoint whose metadata has been read."""

    directory: Path
    manifest: Manifest
    stored: StoredIndex


def _open(path: str, rank: int | None) -> tuple[_Opened, Metadata]:
    """A checkpoint and its metadata; what one rank alone has saved only where there is nothing else."""
    strategy = TorchDistLoadShardedStrategy()
    directory, name = directory_of(path), f"__{rank}{METADATA_FILE}"
    if rank is not None and not strategy.recognises(directory) and (directory / name).is_file():
        manifest = Manifest(backend=strategy.backend, version=strategy.version)
    else:
        name = METADATA_FILE
        directory, manifest = find(path, strategy)
    with reading(directory, manifest, rank or 0, "reading the metadata") as reader:
        index, metadata = _metadata(reader, name)
    return _Opened(directory, manifest, index), metadata


def _metadata(reader: CheckpointReader, name: str) -> tuple[StoredIndex, Metadata]:
    """The index, and the same as DCP's planners know it."""
    record = reader.manifest.record
    if record is not None and INDEX_FILE in (file.name for file in record.files):
        index = read_index(reader)
        tensors: dict[str, Any] = {key: dcp_tensor(index.tensor(number)) for key, number in index.numbers.items()}
        return index, _of(tensors, index.objects)
    source = f"{reader.directory}/{name}"
    raw = load_metadata(reader.read(name), source)
    index = index_of(raw, source)
    reshaped = getattr(raw, "mcore_data", None) or {}  # Megatron's flattened shards, of which the index has true shapes
    tensors = {
        key: dcp_tensor(index.tensor(number)) if key in reshaped else _as_written(raw.state_dict_metadata[key])
        for key, number in index.numbers.items()
    }
    return index, _of(tensors, index.named, _checked(getattr(raw, "planner_data", None), source))


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
    planner: LoadPlanner,
    reader: CheckpointReader,
    index: StoredIndex,
    allow_globals: tuple[Any, ...],
) -> None:
    """Read items into what the planner gives for them.

    A planner that does nothing when a tensor is committed gives the destinations themselves: those are filled side by
    side. Any other is asked for one tensor at a time, by this thread.
    """
    reads = Reads(reader, index, _Asked(planner, allow_globals))
    for item in items:
        _check_stored(item, index)
    ordered = sorted(items, key=reads.place)
    if getattr(planner.commit_tensor, "__func__", None) is not DefaultLoadPlanner.commit_tensor:
        reads.read_in_order(ordered)
        return
    reads.read_in_order([item for item in ordered if item.type == LoadItemType.BYTE_IO])
    regions = [_region(item, planner, index) for item in ordered if item.type != LoadItemType.BYTE_IO]
    synchronize_devices(region.target for region in regions)
    reads.read([(region,) for region in regions])


class _Asked:
    """A planner that is asked for destinations, and gets no archive that our own reader refuses."""

    def __init__(self, planner: LoadPlanner, allow_globals: tuple[Any, ...]) -> None:
        self._planner = planner
        self._allow = allow_globals

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Hand an object's archive over."""
        if not isinstance(self._planner, ShardedLoadPlanner):  # which has an allow-list of its own
            _check_object(value.getvalue(), f"object {read_item.storage_index.fqn!r}", self._allow)
        self._planner.load_bytes(read_item, value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to fill."""
        target = self._planner.resolve_tensor(read_item).detach()
        _check_shape(target, read_item)
        synchronize_devices([target])
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It is filled."""
        self._planner.commit_tensor(read_item, tensor)


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


def _region(item: ReadItem, planner: LoadPlanner, index: StoredIndex) -> Region:
    """An item as a region of a stored chunk."""
    key = item.storage_index.fqn
    number = index.numbers[key]
    chunk = index.tensor(number).chunks[tuple(item.storage_index.offset or ())]
    target = planner.resolve_tensor(item).detach()
    _check_shape(target, item)
    check_cast(key, index.dtypes[number], target.dtype)
    whole = tuple(item.lengths) == tuple(chunk.box.shape)
    return Region(number, chunk, tuple(item.storage_offsets), target, whole)


def _check_shape(target: torch.Tensor, item: ReadItem) -> None:
    if target.shape != item.lengths:
        raise ShardingError(
            f"tensor {item.dest_index.fqn!r}: the planner gave a destination of shape {tuple(target.shape)} for "
            f"{tuple(item.lengths)} elements"
        )


__all__ = ["CheckpointStorageReader"]
