"""A storage writer for plain ``dcp.save`` and ``dcp.async_save``: atomic, with digests, as fast as shardckpt's saves.

It has no collectives of its own: all messages between ranks travel in DCP's plans and results. The coordinator creates
the staging directory in ``prepare_global_plan``, and sends its path in the plan of each rank. Each rank returns the
records of its files among its results. The coordinator commits in ``finish``, which DCP calls only if no rank failed.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import sys
import threading
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardckpt.archive import ARCHIVE_ALIGN, load_metadata, make_frame
from shardckpt.engine import ExternalSave, ExternalSavePart, expand_home, write_part
from shardckpt.errors import CheckpointingException, ShardingError, listed
from shardckpt.storage import digest_vote
from shardckpt.tensors import page_offset, synchronize_devices
from shardckpt_torch_dist.dialects import METADATA_FILE
from shardckpt_torch_dist.plan import append_archive, check_archive, check_tensor
from shardckpt_torch_dist.save import TorchDistSaveShardedStrategy
from shardckpt_torch_dist.torch_private import StorageInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import FrameType

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

    from shardckpt.manifest import FileRecord
    from shardckpt.storage import CheckpointWriter


class CheckpointStorageWriter(StorageWriter):
    """Writes a checkpoint for ``dcp.save`` and ``dcp.async_save``; the directory is a complete checkpoint, or absent.

    Stock ``dcp.load``, :class:`CheckpointStorageReader` and ``shardckpt`` read it. After an error nothing of the save
    is at the path; its staging directory is removed with this instance, by its next save, or when the process ends. An
    instance can serve any number of saves, one after the other, and be pickled for ``AsyncCheckpointerType.PROCESS``.

    ``dcp.async_save`` calls collectives in a thread: pass it a process group that nothing else uses. On the default
    group of a training that has only gloo it is refused, because it would hang or crash.

    Args:
        path: The checkpoint's directory, on storage that all ranks share.
        overwrite: Whether to replace a checkpoint at the path; other files there are kept next to the new one.
        allow_globals: Classes and functions that objects may name, in addition to the plain ones; each by itself, or as
            (class or function, "module.name"). A save refuses objects that a load would refuse.

    Example::

        dcp.save(state, storage_writer=CheckpointStorageWriter("step-1"))
    """

    def __init__(
        self, path: str | os.PathLike[str], overwrite: bool = False, *, allow_globals: Iterable[Any] = ()
    ) -> None:
        super().__init__()
        self._path = os.fspath(path)
        self._overwrite = overwrite
        self._allow = tuple(allow_globals)
        self._save: ExternalSave | None = None

    @property
    def checkpoint_id(self) -> str:
        """The path, for DCP's logs.

        Raises:
            CheckpointingException: ``dcp.async_save`` asks, on a process group that it must not use. There is no later
                place to refuse: DCP's next step is a collective.
        """
        _check_async_group(self._path)
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, to another path if one is given; remove the files of an unfinished one."""
        self._path = os.fspath(checkpoint_id) if checkpoint_id else self._path
        _check_async_group(self._path)
        self._abort()

    def storage_meta(self) -> StorageMeta:
        """Return the path, for planners."""
        return StorageMeta(checkpoint_id=self._path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - DCP's
        """Begin a save on this rank."""
        if not kwargs.get("use_collectives", True):
            raise CheckpointingException(
                f"{self._path}: without collectives every rank would commit a checkpoint of its own over those of the "
                "others: leave out use_collectives=False, or give every rank a path of its own with no_dist=True"
            )
        self._abort()
        _received.part = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan with this rank's vote on the digest, for the coordinator to choose one."""
        return dataclasses.replace(plan, storage_data=digest_vote())

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: create the staging directory; return the plans, each with its rank's part of the save."""
        self._save = ExternalSave(
            self._path,
            TorchDistSaveShardedStrategy(),
            len(plans),
            self,
            overwrite=self._overwrite,
            # a plan that DCP has cached comes without a vote
            digest_votes=[plan.storage_data for plan in plans if isinstance(plan.storage_data, int)],
        )
        parts = self._save.parts()
        _received.part = parts[0]  # where DCP runs in one process, no plan travels
        return [dataclasses.replace(plan, storage_data=_Message(part)) for plan, part in zip(plans, parts, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file; it is durable when this returns.

        Args:
            plan: The rank's plan.
            planner: Gives the values.

        Returns:
            A future, already done, of one result per item and one with the records of the files.

        Raises:
            CheckpointingException: The methods were not called by ``dcp.save``, in order.
            ShardingError: The planner gave a value that it did not plan.
        """
        part, _received.part = _received.part, None
        if part is None:
            raise CheckpointingException(
                f"{self._path}: no plan of this save has come to this thread: let dcp.save call the methods, in order"
            )
        name, results = f"__{part.rank}_0.distcp", list[WriteResult]()
        files = write_part(part, lambda writer: results.extend(_write_items(plan, planner, self._allow, writer, name)))
        results.append(WriteResult(MetadataIndex(f"files of rank {part.rank}"), 0, _RankFiles(files)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have written: write the metadata, and commit."""
        save, self._save = self._save, None
        if save is None:
            raise CheckpointingException(
                f"{self._path}: finish without a plan: let dcp.save call the methods, in order"
            )
        locations: dict[MetadataIndex, Any] = {}
        files: list[FileRecord] = []
        for result in chain.from_iterable(results):
            if isinstance(result.storage_data, _RankFiles):
                files += result.storage_data.records
            else:
                locations[result.index] = result.storage_data
        save.commit(files, lambda writer: _write_metadata(writer, metadata, locations))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether it is a local path below a writable directory."""
        if "://" in os.fspath(checkpoint_id):
            return False
        above = next((path for path in Path(expand_home(checkpoint_id)).absolute().parents if path.exists()), None)
        return above is not None and os.access(above, os.W_OK)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without a save in progress, which belongs to this process."""
        return {**self.__dict__, "_save": None}

    def _abort(self) -> None:
        if self._save is not None:
            self._save.abort()
            self._save = None


def _check_async_group(path: str) -> None:
    """Check that ``dcp.async_save`` has a group of its own where the training can only use gloo.

    Its thread would call collectives on the default group at the same time as the training. gloo has no way to tell
    their messages apart: both hang or crash. A default group that has NCCL, too, is left alone: the training's messages
    go there.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - DCP tells a writer nothing of its group
    while (
        frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint._async_thread_executor"
    ):
        frame = frame.f_back
    if frame is None or frame.f_locals.get("no_dist") or not dist.is_initialized():
        return
    if frame.f_locals.get("process_group") not in (None, dist.group.WORLD) or dist.get_world_size() == 1:
        return
    if all(backend.endswith(":gloo") for backend in str(dist.get_backend_config(dist.group.WORLD)).split(",")):
        raise CheckpointingException(
            f"{path}: dcp.async_save has the default process group, on which the training calls its own collectives: "
            "gloo mixes their messages up, and both hang or crash. Make a group once, and pass it to each save: "
            "dcp.async_save(..., process_group=dist.new_group(backend='gloo'))"
        )


class _Received(threading.local):  # dcp.async_save runs a save in a thread of its own
    """The part of the save that this thread has received from the coordinator."""

    part: ExternalSavePart | None = None


_received = _Received()


class _Message:
    """A part on its way to its rank; to unpickle it there stores it in ``_received``.

    The part cannot stay in the plan: a planner that caches plans passes ``write_data`` the plan of an earlier save.
    """

    def __init__(self, part: ExternalSavePart) -> None:
        self._part = part

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self._part,)


def _receive(part: ExternalSavePart) -> _Message:
    _received.part = part
    return _Message(part)


class _RankFiles(NamedTuple):
    """The records of the files that a rank wrote, on their way to the coordinator."""

    records: list[FileRecord]


def _write_items(
    plan: SavePlan, planner: SavePlanner, allow_globals: tuple[Any, ...], writer: CheckpointWriter, name: str
) -> Iterator[WriteResult]:
    """Write a plan's items one after the other into one file, the objects first; yield where each is."""
    items = sorted(plan.items, key=lambda item: item.type != WriteItemType.BYTE_IO)
    if not items:
        return
    file = writer.create(name, sum(map(_nbytes, items)))
    for item in items:
        key, start, value = item.index.fqn, file.position, planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            archive = check_archive(value, item, allow_globals)
            length = len(archive)
            file.append_small((archive, bytes(-length % ARCHIVE_ALIGN)), what=key)
        else:
            tensor = check_tensor(value, item).detach()
            synchronize_devices([tensor])
            head, tail = make_frame(tensor.dtype, tuple(tensor.shape), start, page_offset(tensor))
            length = len(head) + _nbytes(item) + len(tail)
            append_archive(file, tensor, key, length)
        yield WriteResult(item.index, length, StorageInfo(name, start, length))
    writer.finish(file)


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _write_metadata(
    writer: CheckpointWriter, metadata: Metadata, locations: Mapping[MetadataIndex, StorageInfo]
) -> None:
    """Write ``.metadata`` as DCP's own writer does."""
    _check_complete(metadata, locations)
    metadata.storage_data = locations
    metadata.storage_meta = StorageMeta()
    data = pickle.dumps(metadata)
    load_metadata(data, METADATA_FILE)  # fail now if another planner added objects that a load would refuse
    writer.write(METADATA_FILE, data, keys=0)


def _check_complete(metadata: Metadata, locations: Mapping[MetadataIndex, Any]) -> None:
    """Check that a rank has written each value that the metadata lists."""
    chunks = {key: getattr(entry, "chunks", None) for key, entry in metadata.state_dict_metadata.items()}
    if len(locations) == sum(1 if parts is None else len(parts) for parts in chunks.values()):
        return
    missing = [
        f"{index.fqn!r}" + (f" at {tuple(index.offset)}" if index.offset else "")
        for key, parts in chunks.items()
        for index in ([MetadataIndex(key)] if parts is None else [MetadataIndex(key, part.offsets) for part in parts])
        if index not in locations
    ]
    if missing:
        raise ShardingError(
            f"no rank has written these items of the planner's metadata: {listed(missing)}; the metadata does not fit "
            "the plans, or a storage writer has left results out"
        )
