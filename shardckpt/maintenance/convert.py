"""Rewriting a checkpoint in another format, in bounded memory: any load strategy to any save strategy."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import settings
from shardckpt.distributed import Comm
from shardckpt.engine import CheckpointHeader, OpenCheckpoint, Operation, commit_files, find_saver, locate
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Box
from shardckpt.plugins import choose_reader, get_plugin_manager, hold_checkpoint
from shardckpt.storage import Buffer, CheckpointReader, is_read_again, retry_if_replaced
from shardckpt.strategy import LoadContext, ReadsPlainObjects, SaveContext
from shardckpt.tensors import LARGE, DeferredTensor
from shardckpt.validation import GivenShards, describe_shards

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from shardckpt.manifest import Manifest
    from shardckpt.mapping import ShardedBase
    from shardckpt.planning import Ints
    from shardckpt.plugins import PluginManager
    from shardckpt.storage import CheckpointWriter
    from shardckpt.strategy import SaveStrategy

#: Bytes of tensors in memory, if the caller names none.
_MEMORY = 256 << 20
#: The least that a caller may ask for. The buffers of the reader and the writer have about as many bytes.
_LEAST_MEMORY = 16 << 20
#: Bytes of small tensors that are read together: each read costs a plan.
_BATCH_BYTES = 8 << 20


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion has written.

    Attributes:
        old: Backend and version of the old checkpoint.
        new: Backend and version of the new one.
        tensors: Number of tensors.
        objects: Number of objects.
        nbytes: Bytes of the tensors' values.
    """

    old: tuple[str, int]
    new: tuple[str, int]
    tensors: int
    objects: int
    nbytes: int


def convert_checkpoint(
    old: str | os.PathLike[str],
    new: str | os.PathLike[str],
    to: Any,
    *,
    memory: int = _MEMORY,
    overwrite: bool = False,
    allow_globals: tuple[Any, ...] = (),
) -> ConversionReport:
    """Write the checkpoint at ``old`` in another format at ``new``, completely or not at all. Not collective.

    Keys, shapes, dtypes and bits stay, as do objects, common state and ``content_metadata``. A tensor may be stored in
    other boxes than before. All that is read is checked against its digests, if it has any.

    Args:
        old: The checkpoint's directory or URL; it is not changed, unless it is ``new``, too.
        new: Directory or URL of the new checkpoint: absent or empty, or see ``overwrite``.
        to: What to write: a SaveStrategy, a backend, or (backend, version).
        memory: Bytes of tensors that are in memory at a time, at least 16 MiB; a larger tensor is stored in several
            boxes. To them come buffers of up to 32 MiB, and the index, the objects and the common state, which are in
            memory as a whole. A strategy that keeps copies of its own until it has all of them needs more.
        overwrite: As for :func:`migrate_checkpoint`.
        allow_globals: Classes and functions that pickled objects may name, besides those that every load accepts.

    Returns:
        What was written.

    Raises:
        UnknownBackendError: no installed strategy saves ``to``.
        CannotLoadError: no installed strategy reads ``old``.
        CheckpointingException: ``old`` is a checkpoint of that format already, or damaged; or the new format refuses a
            tensor or object, which the error names.

    Example::

        convert_checkpoint("step-1", "step-1-ep", "ep")
    """
    if memory < _LEAST_MEMORY:
        raise CheckpointingException(
            f"memory={memory} bytes for converting {old}: at least {_LEAST_MEMORY >> 20} MiB are needed"
        )
    plugins = get_plugin_manager()
    saver = find_saver(to, plugins)

    def attempt() -> ConversionReport:
        conversion = _Conversion(locate(old, plugins), locate(new, plugins), saver, plugins, memory, allow_globals)
        return conversion.run(overwrite=overwrite)

    return retry_if_replaced(attempt, old)


@dataclass(frozen=True)
class _Conversion:
    """One attempt; the arguments are those of :func:`convert_checkpoint`."""

    source: Path
    target: Path
    saver: SaveStrategy
    plugins: PluginManager
    memory: int
    allow_globals: tuple[Any, ...]

    def run(self, *, overwrite: bool) -> ConversionReport:
        """Convert, and commit."""
        operation = Operation("convert", self.target, Comm(alone=True), self.plugins)
        with operation.collective_span():
            place, manifest = hold_checkpoint(self.source, self.plugins)
            self._refuse_same(manifest)
            operation.set_strategy(self.saver)
            with CheckpointReader(place, manifest, verify=True) as reader:
                if is_read_again() and manifest.record is not None:  # as when a checkpoint is opened for a load
                    reader.open_files([file.name for file in manifest.record.files])
                return self._convert(self._open(reader), operation, overwrite=overwrite)

    def _refuse_same(self, manifest: Manifest) -> None:
        # another library's checkpoint of the same name may be of another dialect, and gets digests
        own = self.saver.backend, self.saver.version
        if (manifest.backend, manifest.version) == own and manifest.record is not None:
            raise CheckpointingException(
                f"{self.source} is a {own[0]!r} checkpoint of version {own[1]} already: copy its directory, or name "
                "another backend or version"
            )

    def _open(self, reader: CheckpointReader) -> OpenCheckpoint:
        comm = Comm(alone=True)
        operation = Operation("load", self.source, comm, self.plugins)
        strategy = choose_reader(self.source, reader.manifest, self.plugins)
        operation.set_strategy(strategy)
        return OpenCheckpoint(strategy, LoadContext(reader, comm, self.allow_globals), operation)

    def _convert(self, stored: OpenCheckpoint, operation: Operation, *, overwrite: bool) -> ConversionReport:
        reader = stored.context.reader
        index, common = stored.index(), stored.common()
        tensors = [shard for shard in index if isinstance(shard, ShardedTensor)]
        objects = self._read_objects(stored, [shard for shard in index if isinstance(shard, ShardedObject)])
        boxes = _DeferredBoxes(stored, tensors, self._box_bytes())
        shards: list[ShardedBase] = [*boxes.shards, *objects]

        def write(writer: CheckpointWriter, save_id: str) -> None:
            comm = operation.comm
            context = SaveContext(
                writer=writer, comm=comm, save_id=save_id, allow_globals=self.allow_globals, staging=writer.directory
            )
            self.saver.save(shards, common, context)
            GivenShards(describe_shards(shards), self.saver).compare(writer.shards, comm)
            reader.check_unchanged()  # else the new checkpoint might be made of two saves, with correct digests

        header = CheckpointHeader(self.saver.backend, self.saver.version, self.saver.reader)
        content = common.get("content_metadata")
        commit_files(operation, self.target, header, write, overwrite=overwrite, content=content)
        return ConversionReport(
            old=(reader.manifest.backend, reader.manifest.version),
            new=(self.saver.backend, self.saver.version),
            tensors=len(tensors),
            objects=len(objects),
            nbytes=sum(math.prod(tensor.global_shape) * tensor.dtype.itemsize for tensor in tensors),
        )

    def _read_objects(self, stored: OpenCheckpoint, objects: list[ShardedObject]) -> list[ShardedObject]:
        """Return the objects with their values, and the PlainObjects, if there are any and the saver stores them."""
        values = stored.values([*objects])
        found = [replace(shard, data=value) for shard, value in zip(objects, values, strict=True)]
        if self.saver.stores_plain_objects and isinstance(stored.strategy, ReadsPlainObjects):
            with stored.operation.local_phase("reading plain objects"):
                found += stored.strategy.read_plain_objects(stored.context)
        return found

    def _box_bytes(self) -> int:
        """Return the most bytes of a box: the writer holds some at a time, one is being read, and one copied."""
        return self.memory // (settings.io_threads() + 3)


class _DeferredBoxes:
    """The tensors of a checkpoint as shards of bounded size, each of which is read when the writer takes its bytes.

    Small boxes are read ahead, as long as they are asked for in order. What was read last is kept until the next read.

    Args:
        stored: The open checkpoint.
        tensors: Descriptions of its tensors.
        most: Most bytes of a box.
    """

    def __init__(self, stored: OpenCheckpoint, tensors: Sequence[ShardedTensor], most: int) -> None:
        self._stored = stored
        self._batch_bytes = min(most, _BATCH_BYTES)
        #: Any thread may ask: a writer has several.
        self._lock = threading.Lock()
        #: The number of the first box that was read last, and the values of it and those that follow.
        self._first = 0
        self._values: list[torch.Tensor] = []
        self._sizes: list[int] = []
        #: The boxes, in the order of the tensors.
        self.shards: list[ShardedTensor] = []
        for tensor in tensors:
            for box in _cut_box(Box((0,) * len(tensor.global_shape), tensor.global_shape), tensor.dtype.itemsize, most):
                self.shards.append(self._describe(tensor, box, len(self.shards)))
                self._sizes.append(box.volume * tensor.dtype.itemsize)

    def _describe(self, tensor: ShardedTensor, box: Box, number: int) -> ShardedTensor:
        data = DeferredTensor(box.shape, tensor.dtype, partial(self._read, number))
        grid = (1,) * len(box.shape) if box.shape == tensor.global_shape else None
        return ShardedTensor(tensor.key, data, tensor.dtype, box.shape, tensor.global_shape, box.offset, grid)

    def _read(self, number: int) -> torch.Tensor:
        with self._lock:
            end = self._first + len(self._values)
            if not self._first <= number < end:
                self._values = []  # before the read: both would be in memory
                self._values, self._first = self._read_batch(self._find_batch(number, is_next=number == end)), number
            return self._values[number - self._first]

    def _read_batch(self, batch: list[ShardedTensor]) -> list[torch.Tensor]:
        try:
            return self._stored.values(list(map(_make_destination, batch)))
        except CheckpointingException:
            if len(batch) == 1:
                raise
        return self._read_batch(batch[:1])  # the others in their turn: the error then stands with its key

    def _find_batch(self, number: int, *, is_next: bool) -> list[ShardedTensor]:
        """Return the box, and, if it is the next one, those that follow it and fit in a batch."""
        stop, nbytes = number + 1, self._sizes[number]
        while is_next and stop < len(self.shards) and (nbytes := nbytes + self._sizes[stop]) <= self._batch_bytes:
            stop += 1
        return self.shards[number:stop]


def _make_destination(shard: ShardedTensor) -> ShardedTensor:
    """Return a description to read into; large ones with memory of the system, which gets it back at once."""
    wanted = shard.without_data()
    nbytes = math.prod(shard.local_shape) * shard.dtype.itemsize
    if nbytes >= LARGE:  # of torch's allocator, freed blocks of varying sizes kept up to 140 MiB of a budget of 64
        memory = torch.frombuffer(Buffer(nbytes).view, dtype=torch.uint8)
        wanted.data = memory.view(shard.dtype).view(shard.local_shape)
    return wanted


def _cut_box(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Cut a box of a tensor along its first axes into boxes of at most ``most`` bytes."""
    nbytes = box.volume * itemsize
    if nbytes <= most:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    length = box.shape[axis]
    step = max(1, most // (nbytes // length))
    for start in range(0, length, step):
        offset = _replace_at(box.offset, axis, box.offset[axis] + start)
        shape = _replace_at(box.shape, axis, min(step, length - start))
        yield from _cut_box(Box(offset, shape), itemsize, most)


def _replace_at(values: Ints, axis: int, value: int) -> Ints:
    return (*values[:axis], value, *values[axis + 1 :])
