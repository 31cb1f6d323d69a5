"""What a checkpoint stores, in one form for every dialect: tensors as boxes in true global coordinates."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedTensor
from shardckpt.planning import Box, Boxes, make_column

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from shardckpt.planning import Ints, Table

#: The object by which Megatron from 0.19 on stores the common state among the tensors.
COMMON_KEY = "common_state/shard_0_1"
#: The file in which every other dialect has it.
COMMON_FILE = "common.pt"


class Item(NamedTuple):
    """A run of bytes in a file: one complete ``torch.save`` archive."""

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A box of a tensor, and where its elements are.

    Attributes:
        box: The box, in the tensor's true global coordinates.
        item: The archive that holds it.
        first: Index of the box's first element in the archive's tensor; they follow each other from there.
        volume: Number of elements of the archive's tensor.
    """

    box: Box
    item: Item
    first: int
    volume: int


@dataclass(frozen=True)
class StoredTensor:
    """A tensor: its dtype, its true global shape, and the chunks that it is stored in, by their offsets."""

    dtype: torch.dtype
    shape: Ints
    chunks: dict[Ints, Chunk]


@dataclass(frozen=True)
class Chunks:
    """Chunks in columns of int64, a row a chunk; those of a tensor follow each other.

    Attributes:
        box: Their boxes; ``whole`` is the number of the tensor.
        file: Number of the file that has the archive.
        start: Where the archive begins in the file, in bytes.
        length: Bytes of the archive.
        first: Index of the box's first element in the archive's tensor.
        volume: Elements of the archive's tensor.
    """

    box: Table
    file: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    first: torch.Tensor
    volume: torch.Tensor

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True)
class StoredIndex:
    """Everything that a checkpoint stores.

    Attributes:
        keys: Of the tensors.
        dtypes: Of every tensor.
        shapes: Of every tensor, true and global.
        bounds: int64 of shape (tensors + 1,): the chunks of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
        chunks: Of all tensors.
        files: Names of files.
        objects: Megatron's sharded objects, by unique key.
        common: The common state, where it is stored as an object.
        loose: Values that plain DCP stored one by one, by their path in the saved state dict.
        named: Every object, the common state and loose values, too, by its name in ``.metadata``.
        save: What tells the save from every other: a digest of the checkpoint's record, or of ``.metadata``.
        by_megatron: Whether the planner that wrote ``.metadata`` was Megatron's, or ours for Megatron, and not one of
            DCP's own; None where nothing tells.
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
    named: dict[str, Item] = field(default_factory=dict)
    save: str = ""
    by_megatron: bool | None = None

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of every tensor, by key."""
        return {key: number for number, key in enumerate(self.keys)}

    @cached_property
    def _tensors(self) -> dict[int, StoredTensor]:
        return {}

    def chunks_of(self, rows: torch.Tensor | slice, boxes: Table) -> Iterator[Chunk]:
        """Some rows, of which the boxes are given, as objects."""
        columns = self.chunks
        items = map(
            Item,
            map(self.files.__getitem__, columns.file[rows].tolist()),
            columns.start[rows].tolist(),
            columns.length[rows].tolist(),
        )
        corners = (map(tuple, column.tolist()) for column in (boxes.offset, boxes.extent))
        return map(Chunk, map(Box, *corners), items, columns.first[rows].tolist(), columns.volume[rows].tolist())

    def tensor(self, number: int) -> StoredTensor:
        """A tensor's chunks as objects, made once."""
        if number not in self._tensors:
            shape, rows = self.shapes[number], slice(*self.bounds[number : number + 2].tolist())
            chunks = self.chunks_of(rows, self.chunks.box.rows(rows).take_axes(len(shape)))
            self._tensors[number] = StoredTensor(
                self.dtypes[number], shape, {chunk.box.offset: chunk for chunk in chunks}
            )
        return self._tensors[number]

    def archive(self, key: str) -> Item:
        """Where an object is, by its unique key or by its name in ``.metadata``."""
        return self.objects[key] if key in self.objects else self.named[key]

    def shards(self) -> list[ShardedBase]:
        """The tensors and objects as data-less descriptions of the whole."""
        tensors = map(ShardedTensor.whole, self.keys, self.dtypes, self.shapes)
        return [*tensors, *(ShardedObject.empty_from_unique_key(key) for key in self.objects)]


def columns_of(tensors: dict[str, StoredTensor]) -> tuple[torch.Tensor, Chunks, list[str]]:
    """Tensors' bounds, their chunks in columns, and the names of files."""
    boxes, files = Boxes(), dict[str, int]()
    columns: list[list[int]] = [[], [], [], [], []]
    bounds = [0]
    for number, tensor in enumerate(tensors.values()):
        for chunk in tensor.chunks.values():
            boxes.add(number, *chunk.box)
            file = files.setdefault(chunk.item.file, len(files))
            row = (file, chunk.item.offset, chunk.item.length, chunk.first, chunk.volume)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        bounds.append(bounds[-1] + len(tensor.chunks))
    return make_column(bounds), Chunks(boxes.table(), *map(make_column, columns)), list(files)


def object_key(key: str) -> str | None:
    """The unique key of one of Megatron's sharded objects as it is spelt today; None for any other key.

    Megatron 0.6 and 0.7 left the extents out of it.
    """
    try:
        return ShardedObject.empty_from_unique_key(key).unique_key
    except CheckpointingException:
        return None


__all__ = [
    "COMMON_FILE",
    "COMMON_KEY",
    "Chunk",
    "Chunks",
    "Item",
    "StoredIndex",
    "StoredTensor",
    "columns_of",
    "object_key",
]
