"""A checkpoint as a mapping whose tensors are read when they are asked for, whole or in slices; needs no other rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.engine.integrity import find_unfit_files
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    import torch

    from shardckpt.engine.integrity import UnfitFile
    from shardckpt.engine.loading import OpenCheckpoint
    from shardckpt.mapping import ShardedBase, StateDict

_Index = int | slice


class StoredTensor:
    """A tensor in a checkpoint: its description, and its values as far as they are asked for.

    ``stored[4:8, :, 2]`` reads the elements of that region, and no others beyond what a read of bytes takes along.
    """

    def __init__(self, checkpoint: OpenCheckpoint, whole: ShardedTensor) -> None:
        self._checkpoint = checkpoint
        self._whole = whole

    @property
    def key(self) -> str:
        """Its name."""
        return self._whole.key

    @property
    def shape(self) -> tuple[int, ...]:
        """Its global shape."""
        return tuple(self._whole.global_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self._whole.dtype

    def read(self) -> torch.Tensor:
        """The whole tensor, on the CPU."""
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
    """The tensors of an open checkpoint by key; objects and common state beside them. A context manager's value."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def backend(self) -> str:
        """Its format family."""
        return self._checkpoint.context.reader.manifest.backend

    @property
    def version(self) -> int:
        """Its version of the format."""
        return self._checkpoint.context.reader.manifest.version

    @property
    def common(self) -> StateDict:
        """The state that is not sharded, read anew each time."""
        return self._checkpoint.common()

    @property
    def objects(self) -> list[str]:
        """Unique keys of the ShardedObjects."""
        return [shard.unique_key for shard in self._index if isinstance(shard, ShardedObject)]

    def unfit_files(self) -> list[UnfitFile]:
        """The files that are missing or have not the size that they need, and which keys are in them."""
        return find_unfit_files(self._checkpoint.strategy, self._checkpoint.context.reader)

    def read_object(self, unique_key: str) -> Any:
        """A ShardedObject's value."""
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
    """(start, stop) along every axis, and the axes that an integer picks one element of."""
    full = list(index)
    if Ellipsis in full:
        place = full.index(Ellipsis)
        full[place : place + 1] = [slice(None)] * (len(shape) - len(full) + 1)
    full += [slice(None)] * (len(shape) - len(full))
    if len(full) != len(shape):
        raise CheckpointingException(f"{key!r} has {len(shape)} axes, {index} asks for {len(full)}")
    spans = [_span(key, part, size) for part, size in zip(full, shape, strict=True)]
    return spans, [axis for axis, part in enumerate(full) if isinstance(part, int)]


def _span(key: str, part: _Index, size: int) -> tuple[int, int]:
    if isinstance(part, slice):
        start, stop, step = part.indices(size)
        if step != 1:
            raise CheckpointingException(f"{key!r}: {part} has a step; read the rows between and take every n-th there")
        return start, max(start, stop)
    if not isinstance(part, int):
        raise CheckpointingException(f"{key!r}: expected integers, slices and '...' as indices, got {part!r}")
    if not -size <= part < size:
        raise CheckpointingException(f"{key!r}: index {part} is outside an axis of {size}")
    return part % size, part % size + 1


__all__ = ["StoredCheckpoint", "StoredTensor"]
