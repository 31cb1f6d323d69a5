"""The index of a checkpoint, in one form for every dialect: tensors as boxes in true global coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.chunks import ChunkIndex, Chunks, StoredTensor
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning import Boxes, list_rows, make_bounds, make_column, make_matrix, number_groups
from shardckpt.strategy import StoredColumns

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from shardckpt.chunks import Item
    from shardckpt.planning import Ints, Table

#: The object in which Megatron from 0.19 on stores the common state, in the same files as the tensors.
COMMON_KEY = "common_state/shard_0_1"


@dataclass(frozen=True)
class StoredIndex(ChunkIndex):
    """Everything that a checkpoint stores. A tensor's number is its position in ``keys``.

    Attributes:
        keys: The keys of the tensors.
        shapes: Their true global shapes.
        bounds: int64 of shape (tensors + 1,): the chunks of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
        chunks: The chunks of all tensors.
        files: The names of the data files, in the order of their numbers.
        objects: Megatron's sharded objects, by unique key, and, in our own checkpoints, PlainObjects, by each of their
            keys.
        common: The common state, if it is stored as an object.
        loose: The values that plain DCP stored one by one, by their path in the saved state dict.
        tensor_paths: The paths of the tensors that plain DCP stored, by key; empty for any other.
        named: Every object by its name in ``.metadata``, including the common state and the loose values.
        save: Identifies the save: a digest of the checkpoint's record, or of ``.metadata``.
        by_megatron: Whether Megatron's planner wrote ``.metadata``, or ours for Megatron, and not one of DCP's; None
            if the metadata does not show it.
    """

    keys: list[str]
    dtypes: list[torch.dtype]
    shapes: list[Ints]
    bounds: torch.Tensor
    chunks: Chunks
    files: list[str]
    objects: dict[str, Item] = field(default_factory=dict)
    common: Item | None = None
    loose: dict[tuple[Any, ...], Item] = field(default_factory=dict)
    tensor_paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    named: dict[str, Item] = field(default_factory=dict)
    save: str = ""
    by_megatron: bool | None = None

    @cached_property
    def _tensors(self) -> dict[int, StoredTensor]:
        return {}

    def select_chunks(
        self,
        numbers: torch.Tensor,
        wanted: Callable[[], Table] | None = None,  # noqa: ARG002 - all chunks are in memory
    ) -> tuple[Chunks, torch.Tensor]:
        """Return the chunks of some tensors, numbered anew, and their bounds; see the base."""
        if len(numbers) == len(self.keys):
            return self.chunks, self.bounds
        rows = list_rows(numbers, self.bounds)
        counts = self.bounds[numbers + 1] - self.bounds[numbers]
        bounds = make_bounds(counts)
        chunks = self.chunks
        box = chunks.box.rows(rows)._replace(spec=number_groups(bounds[1:]))
        columns = (chunks.file, chunks.start, chunks.length, chunks.first, chunks.volume)
        return Chunks(box, *(column[rows] for column in columns)), bounds

    def tensor(self, number: int) -> StoredTensor:
        """Return the tensor with this number, with its chunks as objects; they are made once."""
        if number not in self._tensors:
            shape, rows = self.shapes[number], slice(*self.bounds[number : number + 2].tolist())
            chunks = self.chunks.list(rows, self.chunks.box.rows(rows).first_axes(len(shape)), self.files)
            self._tensors[number] = StoredTensor(
                self.dtypes[number], shape, {chunk.box.offset: chunk for chunk in chunks}
            )
        return self._tensors[number]

    def tensor_of(self, key: str) -> ShardedTensor:
        """Return the description of a stored tensor, unsharded and without data."""
        number = self.numbers[key]
        return ShardedTensor.from_global_shape(key, self.dtypes[number], self.shapes[number])

    def find_object(self, key: str) -> Item:
        """Return where an object is stored, by its unique key or its name in ``.metadata``."""
        return self.objects[key] if key in self.objects else self.named[key]

    def columns(self) -> StoredColumns:
        """Return the tensors, with their dtypes and shapes, the sharded objects, and the loose values."""
        values = [".".join(map(str, path)) for path in self.loose]
        return StoredColumns(self.keys, self.dtypes, self.shapes, [*self.grids], {}, values)

    @property
    def grids(self) -> dict[str, Item]:
        """Megatron's sharded objects, by unique key."""
        return {key: item for key, item in self.objects.items() if parse_object_key(key) is not None}


def tensors_to_columns(tensors: dict[str, StoredTensor]) -> tuple[torch.Tensor, Chunks, list[str]]:
    """Return the ``bounds``, ``chunks`` and ``files`` of a :class:`StoredIndex` of these tensors."""
    boxes, files = Boxes(), dict[str, int]()
    rows: list[tuple[int, ...]] = []
    bounds = [0]
    for number, tensor in enumerate(tensors.values()):
        for chunk in tensor.chunks.values():
            boxes.add(number, *chunk.box)
            file = files.setdefault(chunk.item.file, len(files))
            rows.append((file, chunk.item.offset, chunk.item.length, chunk.first, chunk.volume))
        bounds.append(len(rows))
    return make_column(bounds), Chunks(boxes.table(), *make_matrix(rows, 5, 0).unbind(1)), list(files)


def parse_object_key(key: str) -> str | None:
    """Return the unique key of a sharded object of Megatron's in today's spelling, or None for any other key.

    Megatron 0.6 and 0.7 left the extents out of the key.
    """
    if "/shard_" not in key:  # an option is listed under each parameter: an exception for each takes its time
        return None
    try:
        return ShardedObject.empty_from_unique_key(key).unique_key
    except CheckpointingException:
        return None
