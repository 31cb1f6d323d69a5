"""A load strategy for DeepSpeed's checkpoints."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive.payload_reads import read_payload
from shardckpt.archive.reader import Archive
from shardckpt.chunks.load import ChunkLoadStrategy, StoredChunk
from shardckpt.deepspeed.index import ModelStates, StoredTensorFile, index_partitions
from shardckpt.deepspeed.universal import index_universal
from shardckpt.distributed.comm import Comm
from shardckpt.errors import is_first_warning, listed
from shardckpt.mapping.sharded_object import PlainObject, ShardedObject
from shardckpt.planning.boxes import Box
from shardckpt.strategy import LoadContext, StoredFile, find_error
from shardckpt.tensors.wrappers import copy_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.chunks.load import ChunkRead
    from shardckpt.deepspeed.files import DeepSpeedFiles
    from shardckpt.deepspeed.index import Index
    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping.base import StateDict
    from shardckpt.storage.reader import CheckpointReader

logger = logging.getLogger(__name__)


class DeepSpeedLoadStrategy(ChunkLoadStrategy):
    """Reads ZeRO and universal checkpoints of DeepSpeed by the allow-list, without running code in them.

    Keys are as in :func:`shardckpt.adapters.to_sharded_state_dict`: ``model.<name>`` is the fp32 weight, and
    ``optimizer.state.<name>.exp_avg`` a moment. Ranges of files are read, so that memory is bounded.
    """

    backend = "deepspeed"
    version = 1
    reads = "ZeRO and universal checkpoints of DeepSpeed"

    def __init__(self, files: DeepSpeedFiles) -> None:
        self._files = files

    def list_chunks(self, context: LoadContext) -> Iterator[StoredChunk]:
        """Yield the boxes of the weights and moments, and the counts of steps, which are known."""
        index = self._index(context)
        for key, found in index.tensors.items():
            for box, file, payload in found.chunks:
                yield StoredChunk(key, found.dtype, found.shape, box, file, payload)
        for key, step in index.steps.items():
            yield StoredChunk(key, step.dtype, (), Box((), ()), "", step)

    def read_part(self, read: ChunkRead, context: LoadContext) -> None:
        """Read a part of the payload of a tensor in a file."""
        chunk = read.chunk
        if chunk.file:
            read_payload(context.reader, chunk.file, chunk.source, read.start, read.target, chunk.key)
        else:
            copy_values(read.target, chunk.source)

    def list_objects(self, context: LoadContext) -> Sequence[str]:
        """Return the unique keys of the options of the optimizer for each parameter."""
        return [ShardedObject(key, None, (1,), (0,)).unique_key for key in self._index(context).objects]

    def read_object(self, shard: ShardedObject, context: LoadContext) -> Any:
        """Return the options of a parameter."""
        return self._index(context).objects[shard.key]

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the job's other values: its counts of steps, its schedule, and its client state.

        The main rank warns, once per checkpoint, of the values of the optimizer that are not read.
        """
        index = self._index(context)
        unread, directory = listed(sorted(index.unread)), str(context.reader.directory)
        if index.unread and context.comm.is_main and is_first_warning(__name__, directory, unread):
            logger.warning(
                "%s: these values of the optimizer are not read, since only Adam's are: %s", directory, unread
            )
        return dict(index.common)

    def read_step(self, context: LoadContext) -> int | None:
        """Return the step of the training, by DeepSpeed's own count; None if it is not stored."""
        step = self._index(context).common.get("global_steps")
        return step if type(step) is int and 0 <= step < 1 << 53 else None  # a pickle may have any number

    def read_plain_objects(self, context: LoadContext) -> list[PlainObject]:
        """Return the values of the common state as stock ``dcp.load`` asks for them: by their paths."""
        return [PlainObject(key, value) for key, value in self._index(context).common.items()]

    def list_plain_objects(self, context: LoadContext) -> list[str]:  # noqa: ARG002 - they are the common state
        """Return an empty list: the common state has the values of all."""
        return []

    def list_files(self, reader: CheckpointReader) -> list[StoredFile]:
        """Return the files, with the tensors in each."""
        others = self._index(LoadContext(reader, Comm(alone=True))).files
        keys: dict[str, list[str]] = {name: [] for name in (*self._files.models, *self._files.partitions, *others)}
        for box in self.list_boxes(reader):
            keys.setdefault(box.file, []).append(box.key)
        return [StoredFile(name, keys=tuple(dict.fromkeys(found))) for name, found in keys.items()]

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each file, or None: it is compared with the CRC-32 that it has of its values, if any.

        Files that do not fit together, or a pickle that cannot be read, raise.
        """

        def check(name: str) -> None:
            Archive.of_file(reader, name).check_members(reader, name)

        return {found.name: find_error(check, found.name) for found in self.list_files(reader)}

    def _index(self, context: LoadContext) -> Index:
        return context.reader.parsed("deepspeed", lambda: _read_index(self._files, context))


def _read_index(files: DeepSpeedFiles, context: LoadContext) -> Index:
    reader = context.reader
    place = str(reader.directory)

    def describe(name: str) -> Any:
        return Archive.of_file(reader, name).describe(context.allow_globals)

    def read_tensor(found: StoredTensorFile) -> torch.Tensor:
        target = torch.empty(found.payload.shape, dtype=found.payload.dtype, device="cpu")
        read_payload(reader, found.file, found.payload, (0,) * target.ndim, target, found.file)
        return target

    models = ModelStates({name: describe(name) for name in files.models}, place, read_tensor)
    if files.partitions:
        return index_partitions({name: describe(name) for name in files.partitions}, models, place, read_tensor)
    return index_universal(reader.place, describe, models, place, read_tensor)
