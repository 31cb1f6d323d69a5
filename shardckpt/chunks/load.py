"""The base of load strategies that read boxes of tensors: match, agree, and read into the destinations by threads."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.chunks.parts import make_finder, match_parts
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CorruptCheckpointError, ShardingError
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import Box, part_view, with_memory
from shardckpt.strategy import LoadContext, LoadStrategy, StoredBox, StoredColumns
from shardckpt.tensors.memory import synchronize_devices
from shardckpt.tensors.wrappers import copy_box, movable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import torch

    from shardckpt.mapping.base import ShardedBase
    from shardckpt.planning.boxes import FlatPart, Ints
    from shardckpt.planning.lookup import BoxFinder
    from shardckpt.storage.reader import CheckpointReader


class StoredChunk(NamedTuple):
    """A stored box of a tensor.

    Attributes:
        key: The tensor's key.
        dtype: Its dtype.
        shape: Its global shape.
        box: The box; one that reaches beyond the tensor has padding there.
        file: Path of the file that has the values; ``""`` if they are known already.
        source: The format's own data for reading them.
        offset: About where they begin in the file: reads are in that order.
    """

    key: str
    dtype: torch.dtype
    shape: Ints
    box: Box
    file: str
    source: Any = None
    offset: int = 0


class ChunkRead(NamedTuple):
    """A box of a chunk, and the tensor that it fills.

    Attributes:
        chunk: The chunk.
        start: Where the box begins in the chunk.
        target: The tensor; its shape is the box's.
    """

    chunk: StoredChunk
    start: Ints
    target: torch.Tensor


class ChunkLoadStrategy(LoadStrategy):
    """Loads tensors that are stored as boxes. A format lists the boxes and reads one; the base does the rest.

    It finds the boxes of each shard, refuses holes and overlaps, waits until every rank has planned the same save, and
    only then reads: by several threads, into the memory of the shards, cast to their dtypes.
    """

    @abstractmethod
    def list_chunks(self, context: LoadContext) -> Iterable[StoredChunk]:
        """Return the stored boxes of all tensors, the same on every rank; it is asked once for a checkpoint.

        A tensor without elements has a box without any.

        Args:
            context: The checkpoint's files.
        """

    def read_chunk(self, chunk: StoredChunk, context: LoadContext) -> torch.Tensor:
        """Return the values of a box: a CPU tensor of its shape; several threads call this.

        Args:
            chunk: A chunk that :meth:`list_chunks` has returned.
            context: The checkpoint's files, and the caller's options.
        """
        raise NotImplementedError(f"{type(self).__qualname__} has neither read_chunk nor read_part")

    def read_part(self, read: ChunkRead, context: LoadContext) -> None:
        """Fill a tensor with a part of a box. By default all of the box is read: override it where a part can be.

        Args:
            read: The part, and the tensor, of any strides, dtype and device; several threads call this.
            context: The checkpoint's files, and the caller's options.
        """
        chunk = read.chunk
        values = self.read_chunk(chunk, context)
        if values.shape != chunk.box.shape:  # of larger ones, others would be taken
            raise CorruptCheckpointError(
                f"{chunk.key!r}: {type(self).__qualname__}.read_chunk returned values of shape {tuple(values.shape)} "
                f"for the {chunk.box} in {chunk.file!r}: the file does not match its index, or the strategy is wrong"
            )
        copy_box(values, read.start, read.target)

    def list_objects(self, context: LoadContext) -> Sequence[str]:  # noqa: ARG002 - a format may have none
        """Return the unique keys of the stored objects; by default there are none."""
        return ()

    def read_object(self, shard: ShardedObject, context: LoadContext) -> Any:  # noqa: ARG002 - as above
        """Return an object of :meth:`list_objects`."""
        raise ShardingError(f"{shard.key!r}: {self.backend!r} stores no objects")

    def identify(self, context: LoadContext) -> bytes:
        """Return an identity of the save: the id in its record. Override it where the index stores an id of its own."""
        return context.reader.manifest.save_id.encode()

    def match(self, shard: ShardedTensor, context: LoadContext) -> Mapping[FlatPart, Sequence[tuple[StoredChunk, Box]]]:
        """Return the chunks that have elements of each part of a shard, each with the box of these elements.

        Override it where a tensor has more chunks than are to be listed.

        Args:
            shard: One that is stored, of this global shape unless ``allow_shape_mismatch`` is set.
            context: The checkpoint's files.

        Raises:
            CorruptCheckpointError: An element is not stored, or is stored twice.
        """
        stored = self._stored(context)[shard.key]
        found = match_parts(shard, stored.finder)
        return {part: [(stored.chunks[n], common) for n, common in touched] for part, touched in found.items()}

    def load(self, wanted: Sequence[ShardedBase], context: LoadContext) -> list[Any]:
        """Collective: plan, and after all ranks have planned, read into the destinations.

        Args:
            wanted: This rank's shards; those with data are filled in place.
            context: The checkpoint's files, and the ranks that load together.

        Returns:
            A tensor for each ShardedTensor and an object for each ShardedObject, in order.

        Raises:
            CheckpointReplacedError: The ranks have read different saves, because the checkpoint is being overwritten.
            CheckpointingException: Stored items are damaged or refused, or do not fill a shard.
        """
        with context.comm.local_phase("planning the load"):
            matched = [self.match(shard, context) if isinstance(shard, ShardedTensor) else {} for shard in wanted]
            # after the match, which shows that the elements are stored: a checkpoint may claim any size
            filled = [with_memory(shard) if isinstance(shard, ShardedTensor) else shard for shard in wanted]
            values = [
                self.read_object(shard, context) if isinstance(shard, ShardedObject) else shard.data for shard in filled
            ]
        context.require_same_save(self.identify(context), "index")
        with context.comm.local_phase("reading shards"):
            reads = [
                read
                for shard, found in zip(filled, matched, strict=True)
                if isinstance(shard, ShardedTensor)
                for read in _plan_reads(shard, found)
            ]
            read_chunks(reads, lambda read: self.read_part(read, context), context.reader)
        return values

    def load_index(self, context: LoadContext) -> list[ShardedBase]:
        """Return the stored tensors without data, unsharded, and the stored objects, by :meth:`list_columns`."""
        return describe_columns(self.list_columns(context))

    def list_columns(self, context: LoadContext) -> StoredColumns:
        """Return the keys, dtypes and shapes of the stored tensors, and the keys of the stored objects.

        Override it where a tensor has more chunks than are to be listed.
        """
        chunks = [stored.chunks[0] for stored in self._stored(context).values()]
        return StoredColumns(
            [chunk.key for chunk in chunks],
            [chunk.dtype for chunk in chunks],
            [chunk.shape for chunk in chunks],
            self.list_objects(context),
            {},
        )

    def list_boxes(self, reader: CheckpointReader) -> Iterator[StoredBox]:
        """Return which file holds which box of each tensor."""
        for stored in self._stored(LoadContext(reader, Comm(alone=True))).values():
            for chunk in stored.chunks:
                if chunk.file:
                    yield StoredBox(chunk.key, *chunk.box, chunk.file)

    def _stored(self, context: LoadContext) -> dict[str, _StoredTensor]:
        return context.reader.parsed(f"chunks of {self.backend}", lambda: _group(self.list_chunks(context)))


class _StoredTensor:
    """The chunks of one tensor, and their finder; it is made when it is first asked for."""

    def __init__(self) -> None:
        self.chunks: list[StoredChunk] = []
        self._finder: BoxFinder | None = None

    @property
    def finder(self) -> BoxFinder:
        if self._finder is None:
            self._finder = make_finder(self.chunks[0].key, [chunk.box for chunk in self.chunks])
        return self._finder


def read_chunks(reads: Iterable[ChunkRead], read: Callable[[ChunkRead], None], reader: CheckpointReader) -> None:
    """Fill tensors by several threads, in the order of the files; devices have the values when it returns."""
    ordered = sorted(reads, key=lambda each: (each.chunk.file, each.chunk.offset))
    # the threads have streams of their own: the caller's pending work on the destinations must be done
    synchronize_devices(each.target for each in ordered)

    def fill(each: ChunkRead) -> None:
        read(each)
        synchronize_devices([each.target])  # the caller's stream does not wait for this thread's

    reader.map(fill, ordered, lambda each: each.target.nbytes)


def describe_columns(columns: StoredColumns) -> list[ShardedBase]:
    """Return the result of ``load_index`` for these columns: tensors without data, then objects."""
    tensors = list(map(ShardedTensor.from_global_shape, columns.keys, columns.dtypes, columns.shapes))
    for shard in tensors if columns.scales else ():
        shard.block_scales = columns.scales.get(shard.key)
    return [*tensors, *map(ShardedObject.empty_from_unique_key, columns.objects)]


def _group(chunks: Iterable[StoredChunk]) -> dict[str, _StoredTensor]:
    found: dict[str, _StoredTensor] = {}
    for chunk in chunks:
        found.setdefault(chunk.key, _StoredTensor()).chunks.append(chunk)
    return found


def _plan_reads(
    shard: ShardedTensor, matched: Mapping[FlatPart, Sequence[tuple[StoredChunk, Box]]]
) -> Iterator[ChunkRead]:
    """Yield the reads of a shard; where not all of it needs to be stored, it is zeroed first."""
    if shard.allow_shape_mismatch and shard.data is not None:
        movable(shard.data).zero_()  # torch has no kernel for packed dtypes, but their zeros are zero bytes
    for part, touched in matched.items():
        view = part_view(shard, part)
        for chunk, common in touched:
            yield ChunkRead(chunk, common.offset_in(chunk.box), view[common.within(part.box)])
