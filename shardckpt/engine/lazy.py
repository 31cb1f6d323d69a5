"""A stored checkpoint as a mapping from key to tensor; tensors are read when they are indexed. Not collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.engine.integrity import find_incomplete_files
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    import torch

    from shardckpt.engine.integrity import IncompleteFile
    from shardckpt.engine.loading import OpenCheckpoint
    from shardckpt.mapping import ShardedBase, StateDict


class StoredTensor:
    """A tensor in a checkpoint: key, shape and dtype; indexing reads its values.

    ``stored[4:8, :, 2]`` returns a CPU tensor of the stored dtype with that region, and reads little more than its
    bytes. Indices are integers, slices without a step, and ``...``.
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

    def read(self) -> torch.Tensor:
        """Return the tensor at its global shape and stored dtype, on the CPU."""
        return self[...]

    def __getitem__(self, index: Any) -> torch.Tensor:
        spans, dropped = _region(self.key, self.shape, index if isinstance(index, tuple) else (index,))
        offset = tuple(start for start, _ in spans)
        shape = tuple(max(stop - start, 0) for start, stop in spans)
        region = ShardedTensor(self.key, None, self.dtype, shape, self.shape, offset, None)
        (values,) = self._checkpoint.values([region])
        for axis in reversed(dropped):
            values = values.select(axis, 0)
        return values  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"StoredTensor({self.key!r}, {self.dtype}, {self.shape})"


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
    def common(self) -> StateDict:
        """The state that is not sharded; each access reads it."""
        return self._checkpoint.common()

    @property
    def objects(self) -> list[str]:
        """Unique keys of the ShardedObjects."""
        return [shard.unique_key for shard in self._index if isinstance(shard, ShardedObject)]

    def find_incomplete_files(self) -> list[IncompleteFile]:
        """Return the files that are missing or have the wrong size, with the keys in them; no data file is opened."""
        return find_incomplete_files(self._checkpoint.strategy, self._checkpoint.context.reader)

    def read_object(self, unique_key: str) -> Any:
        """Return the value of a ShardedObject.

        Args:
            unique_key: One of :attr:`objects`.

        Raises:
            CheckpointingException: no such object is stored, or it cannot be read.
        """
        if unique_key not in self.objects:
            raise CheckpointingException(f"no object {unique_key!r} is stored; there are {self.objects[:8]}")
        (value,) = self._checkpoint.values([ShardedObject.empty_from_unique_key(unique_key)])
        return value

    def __getitem__(self, key: str) -> StoredTensor:
        return StoredTensor(self._checkpoint, self._tensors[key])

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


def _region(key: str, shape: tuple[int, ...], index: tuple[Any, ...]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return (start, stop) along every axis, and the axes that have an integer as index."""
    full = list(index)
    if Ellipsis in full:
        position = full.index(Ellipsis)
        full[position : position + 1] = [slice(None)] * (len(shape) - len(full) + 1)
    full += [slice(None)] * (len(shape) - len(full))
    if len(full) != len(shape):
        raise CheckpointingException(f"{key!r} has {len(shape)} axes, {index} asks for {len(full)}")
    spans = [_span(key, part, size) for part, size in zip(full, shape, strict=True)]
    return spans, [axis for axis, part in enumerate(full) if isinstance(part, int)]


def _span(key: str, part: Any, size: int) -> tuple[int, int]:
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        if step != 1:
            raise CheckpointingException(f"{key!r}: {part} has a step; read the range without it, and slice the result")
        return start, max(start, stop)
    if not isinstance(part, int):
        raise CheckpointingException(f"{key!r}: expected integers, slices and '...' as indices, got {part!r}")
    if not -size <= part < size:
        raise CheckpointingException(f"{key!r}: index {part} is outside an axis of {size}")
    return part % size, part % size + 1
