"""A stored checkpoint as a mapping from key to tensor; tensors are read when they are indexed. Not collective."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from shardckpt.engine.integrity import find_incomplete_files
from shardckpt.engine.renaming import rename_key
from shardckpt.engine.streaming import STREAM_BYTES, compute_fingerprints
from shardckpt.errors import CheckpointingException, KeyMismatchError, list_given, listed, name_known
from shardckpt.mapping.sharded_object import ShardedObject
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.boxes import Box, cut_box
from shardckpt.planning.shard_copies import shard_nbytes
from shardckpt.storage.filesystem import find_size
from shardckpt.storage.sums import read_fingerprints
from shardckpt.strategy import ChecksFiles, ListsBoxes

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from shardckpt.engine.integrity import IncompleteFile
    from shardckpt.engine.opening import OpenCheckpoint
    from shardckpt.manifest.models import Record
    from shardckpt.manifest.names import Lineage, Rescue
    from shardckpt.mapping.base import ShardedBase, StateDict
    from shardckpt.mapping.sharded_tensor import BlockScales
    from shardckpt.strategy import StoredBox, StoredColumns, StoredFile


class StoredTensor:
    """A tensor in a checkpoint: key, shape and dtype; indexing reads its values.

    ``stored[4:8, :, 2]`` returns a CPU tensor of the stored dtype with that region, and reads little more than its
    bytes. Indices are integers, slices without a step, and ``...``. Each such read is planned for itself:
    :meth:`StoredCheckpoint.read` is faster for many.
    """

    def __init__(self, checkpoint: OpenCheckpoint, description: ShardedTensor) -> None:
        self._checkpoint = checkpoint
        self._description = description

    @property
    def key(self) -> str:
        """Its name."""
        return self._description.key

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return tuple(self._description.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._description.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return shard_nbytes(self._description)

    @property
    def block_scales(self) -> BlockScales | None:
        """The tensor that scales its values, if there is one and the format names it."""
        return self._description.block_scales

    def read(self) -> torch.Tensor:
        """Return the tensor at its global shape and stored dtype, on the CPU."""
        return self[...]

    def __getitem__(self, index: Any) -> torch.Tensor:
        region = _Region(self._description, index)
        (values,) = self._checkpoint.values([region.shard])
        return region.drop_axes(values)

    def blocks(self, index: Any = ..., *, max_bytes: int = 16 << 20) -> Iterator[torch.Tensor]:
        """Read a region in blocks, one after the other, so that it need not fit into memory.

        Args:
            index: The region, as for indexing.
            max_bytes: Bytes of the largest block; one element at least.

        Yields:
            CPU tensors of the stored dtype with as many axes as the tensor; together they have each element once, in
            the order of the elements.
        """
        spans, _ = _find_spans(self.key, self.shape, index)
        region = Box(tuple(start for start, _ in spans), tuple(stop - start for start, stop in spans))
        for box in cut_box(region, self.dtype.itemsize, max_bytes):
            yield self[tuple(slice(start, stop) for start, stop in zip(box.offset, box.end, strict=True))]

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, {self.dtype}, {self.shape})"


@runtime_checkable
class _NamesLibrary(Protocol):
    """A load strategy whose files name the library that wrote them."""

    library: str


class StoredCheckpoint(Mapping[str, "StoredTensor"]):
    """An open checkpoint: a mapping from key to :class:`StoredTensor`, with methods for objects and common state.

    ``shardckpt.dist_checkpointing.open_checkpoint`` yields it. It can be used until the end of that block.
    """

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def backend(self) -> str:
        """Name of the format family."""
        return self._checkpoint.context.reader.manifest.backend

    @property
    def version(self) -> int:
        """Version of the format."""
        return self._checkpoint.context.reader.manifest.version

    @property
    def save_id(self) -> str:
        """The id of the save, 32 hex digits; ``""`` for a checkpoint of another library."""
        return self._checkpoint.context.reader.manifest.save_id

    @property
    def lineage(self) -> Lineage:
        """The save id of the checkpoint that its job was resumed from, and its step; None where nothing is stored."""
        return self._checkpoint.context.reader.manifest.lineage

    @property
    def library(self) -> str:
        """The writer's name, from its files where no record has it; ``""`` if unknown."""
        strategy = self._checkpoint.strategy
        return strategy.library if isinstance(strategy, _NamesLibrary) else ""

    @property
    def rescue(self) -> Rescue:
        """The keys that ``convert --skip-damaged`` left out when it wrote this checkpoint."""
        return self._checkpoint.rescue

    @property
    def record(self) -> Record | None:
        """The content of ``shardckpt.json``: writer, ranks, files; None for a checkpoint of another library."""
        return self._checkpoint.context.reader.manifest.record

    @property
    def common(self) -> StateDict:
        """The state that is not sharded; each access reads it."""
        return self._checkpoint.common()

    @cached_property
    def columns(self) -> StoredColumns:
        """Keys, dtypes and shapes of the tensors, and the unique keys of the objects, without an object for each."""
        return self._checkpoint.columns()

    @property
    def objects(self) -> list[str]:
        """Unique keys of the ShardedObjects."""
        return [shard.unique_key for shard in self._index if isinstance(shard, ShardedObject)]

    @property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints of the tensors that the save has stored, by key; empty if it has stored none.

        A tensor with elements stored twice has none.
        """
        found, names = read_fingerprints(self._checkpoint.context.reader), self._checkpoint.names
        return {rename_key(key, names): fingerprint for key, fingerprint in found.items()} if names else found

    def compute_fingerprints(self, keys: Iterable[str] | None = None, *, memory: int = STREAM_BYTES) -> dict[str, str]:
        """Return the fingerprints of tensors, from their values: all of them are read, and checked by their digests.

        Args:
            keys: Of the tensors, or of one; by default all.
            memory: Bytes of values that are in memory at a time.

        Returns:
            As :func:`shardckpt.fingerprint` returns them: equal for equal values, whatever the sharding and the format.

        Raises:
            CheckpointingException: No such tensor is stored, or one cannot be read.
        """
        wanted = self._tensors.keys() if keys is None else dict.fromkeys(list_given(keys)).keys()
        for key in wanted:
            if key not in self:
                raise CheckpointingException(f"no tensor {key!r} is stored {name_known(key, self._tensors, 'keys')}")
        chosen = [tensor for key, tensor in self._tensors.items() if key in wanted]
        return compute_fingerprints(self._checkpoint, chosen, memory)

    def find_incomplete_files(self) -> list[IncompleteFile]:
        """Return the files that are missing or have the wrong size, with the keys in them; no data file is opened."""
        return find_incomplete_files(self._checkpoint.strategy, self._checkpoint.context.reader)

    def list_files(self) -> list[StoredFile]:
        """Return the files that the index names, with the keys in them; empty if the strategy does not say.

        A size that the index does not record is taken from the file; 0 if the file is missing.
        """
        strategy, reader = self._checkpoint.strategy, self._checkpoint.context.reader
        found = strategy.list_files(reader) if isinstance(strategy, ChecksFiles) else []
        return [replace(f, nbytes=f.nbytes or find_size(reader.directory / f.name)) for f in found]

    def list_boxes(self) -> Iterable[StoredBox] | None:
        """Return which file holds which box of each tensor, by the index; None if the strategy does not say."""
        strategy = self._checkpoint.strategy
        return strategy.list_boxes(self._checkpoint.context.reader) if isinstance(strategy, ListsBoxes) else None

    def read_object(self, unique_key: str) -> Any:
        """Return the value of a ShardedObject.

        Raises:
            CheckpointingException: no such object is stored, or it cannot be read.
        """
        if unique_key not in self.objects:
            raise CheckpointingException(
                f"no object {unique_key!r} is stored {name_known(unique_key, self.objects, 'objects')}"
            )
        (value,) = self._checkpoint.values([ShardedObject.empty_from_unique_key(unique_key)])
        return value

    def read(self, regions: Mapping[str, Any] | Iterable[str]) -> dict[str, torch.Tensor]:
        """Read regions of many tensors at once: of small ones many times faster than one after the other.

        Args:
            regions: The index of each tensor by key, as for :class:`StoredTensor`: ``{"embedding": slice(0, 8)}``. Or
                keys, or one, of tensors that are read whole.

        Returns:
            CPU tensors of the stored dtypes, by key, in the order of ``regions``.

        Raises:
            CheckpointingException: No such tensor is stored, an index is outside of it, or it cannot be read.
        """
        indices = regions if isinstance(regions, Mapping) else dict.fromkeys(list_given(regions), ...)
        if missing := [key for key in indices if key not in self]:
            raise CheckpointingException(
                f"{listed([repr(key) for key in missing])} not stored {name_known(missing[0], self._tensors, 'keys')}"
            )
        found = {key: _Region(self._tensors[key], index) for key, index in indices.items()}
        values = self._checkpoint.values([region.shard for region in found.values()])
        return {key: region.drop_axes(value) for (key, region), value in zip(found.items(), values, strict=True)}

    def __getitem__(self, key: str) -> StoredTensor:
        if key not in self._tensors:
            raise _AbsentKeyError(f"no tensor {key!r} is stored {name_known(key, self._tensors, 'keys')}")
        return StoredTensor(self._checkpoint, self._tensors[key])

    def __contains__(self, key: object) -> bool:
        return key in self._tensors  # the base's makes an error of each absent key, which looks for the nearest

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @cached_property
    def _index(self) -> list[ShardedBase]:
        return self._checkpoint.index()

    @cached_property
    def _tensors(self) -> dict[str, ShardedTensor]:
        return {shard.key: shard for shard in self._index if isinstance(shard, ShardedTensor)}


class _AbsentKeyError(KeyMismatchError, KeyError):
    """A key of no stored tensor: as a mapping raises it, and one of the family."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's shows the repr of a key, and this is a text


class _Region:
    """An indexed region of a stored tensor; ``shard`` describes it, without data."""

    def __init__(self, stored: ShardedTensor, index: Any) -> None:
        whole = tuple(stored.global_shape)
        spans, self._dropped = _find_spans(stored.key, whole, index)
        offset = tuple(start for start, _ in spans)
        shape = tuple(max(stop - start, 0) for start, stop in spans)
        self.shard = ShardedTensor(stored.key, None, stored.dtype, shape, whole, offset, None)

    def drop_axes(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values without the axes that have an integer as index."""
        for axis in reversed(self._dropped):
            values = values.select(axis, 0)
        return values


def _find_spans(key: str, shape: tuple[int, ...], index: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """Return (start, stop) along every axis, and the axes that have an integer as index."""
    full = list(index) if isinstance(index, tuple) else [index]
    # by identity: == with an array compares its elements
    if (position := next((axis for axis, part in enumerate(full) if part is ...), None)) is not None:
        full[position : position + 1] = [slice(None)] * (len(shape) - len(full) + 1)
    full += [slice(None)] * (len(shape) - len(full))
    if len(full) != len(shape):
        raise CheckpointingException(f"{key!r} has {len(shape)} axes, {index} asks for {len(full)}")
    spans = [_find_span(key, part, size) for part, size in zip(full, shape, strict=True)]
    return spans, [axis for axis, part in enumerate(full) if not isinstance(part, slice)]


def _find_span(key: str, part: Any, size: int) -> tuple[int, int]:
    """Return (start, stop) along an axis of a size."""
    try:
        if isinstance(part, slice):
            if part.step is not None and operator.index(part.step) != 1:
                raise CheckpointingException(
                    f"{key!r}: {part} has a step; read the range without it, and slice the result"
                )
            start, stop, _ = part.indices(size)
            return start, max(start, stop)
        # a bool is a mask to torch; an array of one integer keeps its axes
        if isinstance(part, bool) or getattr(part, "shape", None):
            raise TypeError
        number = operator.index(part)
    except TypeError:
        raise CheckpointingException(
            f"{key!r}: expected integers, slices of integers and one '...' as indices, got {part!r}"
        ) from None
    if not -size <= number < size:
        raise CheckpointingException(f"{key!r}: index {number} is outside an axis of {size}")
    return number % size, number % size + 1
