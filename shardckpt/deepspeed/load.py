"""A load strategy for DeepSpeed's checkpoints."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.archive import Archive, read_payload
from shardckpt.deepspeed.index import ModelStates, StoredTensorFile, index_partitions
from shardckpt.deepspeed.universal import index_universal
from shardckpt.distributed import Comm
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.planning import intersect, part_view, shard_parts, with_memory
from shardckpt.strategy import LoadContext, LoadStrategy, StoredBox, StoredFile, find_error
from shardckpt.tensors import copy_values

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.archive import StoredPayload
    from shardckpt.deepspeed.files import DeepSpeedFiles
    from shardckpt.deepspeed.index import Index
    from shardckpt.errors import CheckpointingException
    from shardckpt.mapping import ShardedBase, StateDict
    from shardckpt.storage import CheckpointReader


class _Read(NamedTuple):
    """A box to read, and the tensor that it fills."""

    key: str
    file: str
    payload: StoredPayload
    start: tuple[int, ...]
    target: torch.Tensor


class DeepSpeedLoadStrategy(LoadStrategy):
    """Reads ZeRO and universal checkpoints of DeepSpeed by the allow-list, without running code in them.

    Keys are those of :func:`shardckpt.adapters.to_sharded_state_dict`: ``model.<name>`` is the fp32 weight, and
    ``optimizer.state.<name>.exp_avg`` a moment. Ranges of files are read, so that memory is bounded.

    Args:
        files: What the folder has.
    """

    backend = "deepspeed"
    version = 1
    reads = "ZeRO and universal checkpoints of DeepSpeed"

    def __init__(self, files: DeepSpeedFiles) -> None:
        self._files = files

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Read into the shards' data, or into new tensors; see the base."""
        index = self._index(context)
        values: list[Any] = []
        reads: list[_Read] = []
        for shard in wanted:
            if not isinstance(shard, ShardedTensor):
                values.append(index.objects[shard.key])
                continue
            filled = with_memory(shard)
            values.append(filled.data)
            reads += list(_plan(filled, index))

        def read(task: _Read) -> None:
            key, file, payload, start, target = task
            read_payload(context.reader, file, payload, start, target, key)

        context.reader.map(read, reads, lambda task: task.target.nbytes)
        return values

    def load_common(self, context: LoadContext) -> StateDict:
        """Return the job's other values: its counts of steps, its schedule, what it passed as client state."""
        return dict(self._index(context).common)

    def read_step(self, context: LoadContext) -> int | None:
        """Return the step of the training, by DeepSpeed's own count; None if it is not stored.

        Raises:
            CheckpointingException: A file is damaged, missing, or of a kind that is not read here.
        """
        step = self._index(context).common.get("global_steps")
        return step if type(step) is int and 0 <= step < 1 << 53 else None  # a pickle may have any number

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the tensors without data, and the options of the optimizer for each parameter."""
        index = self._index(context)
        tensors = ((key, found.dtype, found.shape) for key, found in index.tensors.items())
        steps = ((key, torch.float32, ()) for key in index.steps)
        return [
            *(ShardedTensor.from_global_shape(*found) for found in chain(tensors, steps)),
            *(ShardedObject(key, None, (1,), (0,)) for key in index.objects),
        ]

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

    def list_boxes(self, reader: CheckpointReader) -> Iterator[StoredBox]:
        """Yield which file has which box of each tensor."""
        for key, found in self._index(LoadContext(reader, Comm(alone=True))).tensors.items():
            for box, file, _ in found.chunks:
                yield StoredBox(key, box.offset, box.shape, file)

    def check_files(self, reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
        """Return the error of each file, or None: it is compared with the CRC-32 that it has of its values, if any.

        Raises:
            CheckpointingException: the files do not fit together, or a pickle cannot be read.
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


def _plan(shard: ShardedTensor, index: Index) -> Iterator[_Read]:
    """Yield what to read of which file into which part of a shard."""
    for part in shard_parts(shard):
        target = part_view(shard, part)
        if shard.key in index.steps:
            copy_values(target, index.steps[shard.key])
            continue
        for box, file, payload in index.tensors[shard.key].chunks:
            common = intersect(part.box, box)
            if common is not None and common.volume:
                start = tuple(low - first for low, first in zip(common.offset, box.offset, strict=True))
                yield _Read(shard.key, file, payload, start, target[common.within(part.box)])
