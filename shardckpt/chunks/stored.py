"""What a checkpoint stores of tensors, as columns: the boxes of each tensor, and the items of files that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box, list_rows, number_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.planning import Ints, Table


class Item(NamedTuple):
    """A byte range of a file that holds one stored value. Items sort by file, then by offset.

    Attributes:
        file: Name of the file.
        offset: Where the item begins, in bytes.
        length: Its size, in bytes.
    """

    file: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A box of a tensor, and where its elements are stored.

    Several chunks may share an item: a flattened shard is one stored tensor with several boxes.

    Attributes:
        box: The box, in the tensor's true global coordinates.
        item: The item that holds it.
        first: Index of the box's first element in the item's tensor; the others follow without gaps.
        volume: Number of elements of the item's tensor.
    """

    box: Box
    item: Item
    first: int
    volume: int


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor.

    Attributes:
        dtype: Its dtype.
        shape: Its true global shape.
        chunks: Its chunks, by their offsets in the tensor.
    """

    dtype: torch.dtype
    shape: Ints
    chunks: dict[Ints, Chunk]

    def boxes(self) -> Iterator[Box]:
        """Return the boxes of its chunks."""
        return (chunk.box for chunk in self.chunks.values())


@dataclass(frozen=True)
class Chunks:
    """The chunks of all tensors as columns of integers, of shape (chunks,). The rows of a tensor follow each other.

    Attributes:
        box: Their boxes, with the number of the tensor for each.
        file: Number of the file that holds the item.
        start: Where the item begins in the file, in bytes.
        length: Size of the item, in bytes.
        first: Index of the box's first element in the item's tensor.
        volume: Number of elements of the item's tensor.
    """

    box: Table
    file: torch.Tensor
    start: torch.Tensor
    length: torch.Tensor
    first: torch.Tensor
    volume: torch.Tensor

    def list(self, rows: torch.Tensor | slice, boxes: Table, files: Sequence[str]) -> Iterator[Chunk]:
        """Return some of the chunks as objects, in order.

        Args:
            rows: Which rows: int64 indices of shape (rows,), or a slice.
            boxes: Their boxes, with as many axes as the result is to have.
            files: The names of the files, by number.
        """
        items = map(
            Item,
            map(files.__getitem__, self.file[rows].tolist()),
            self.start[rows].tolist(),
            self.length[rows].tolist(),
        )
        corners = (map(tuple, column.tolist()) for column in (boxes.offset, boxes.extent))
        return map(Chunk, map(Box, *corners), items, self.first[rows].tolist(), self.volume[rows].tolist())


class ChunkIndex:
    """The tensors of a checkpoint. A tensor's number is its position in ``keys``. A base of the indexes of formats.

    Attributes:
        keys: The keys of the tensors.
        dtypes: Their dtypes.
        shapes: Their true global shapes.
        bounds: int64 of shape (tensors + 1,): the chunks of tensor ``n`` are rows ``bounds[n]`` to ``bounds[n + 1]``.
        chunks: The chunks of all tensors.
        files: The names of the data files, in the order of their numbers.
    """

    keys: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Ints]
    bounds: torch.Tensor
    chunks: Chunks
    files: Sequence[str]

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each tensor, by key."""
        return {key: number for number, key in enumerate(self.keys)}

    @cached_property
    def _tensors(self) -> dict[int, StoredTensor]:
        return {}

    def take_chunks(self, numbers: torch.Tensor) -> tuple[Chunks, torch.Tensor]:
        """Return the chunks of some tensors, numbered anew, and their bounds; a format may check them first.

        Args:
            numbers: int64 of shape (n,): the tensors, ascending, each once.

        Returns:
            The chunks as int64 columns, with tensors numbered by their place in ``numbers``; and where those of each
            begin, int64 of shape (n + 1,).
        """
        if len(numbers) == len(self.keys):
            return self.chunks, self.bounds
        rows = list_rows(numbers, self.bounds)
        counts = self.bounds[numbers + 1] - self.bounds[numbers]
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        chunks = self.chunks
        box = chunks.box.rows(rows)._replace(spec=number_groups(bounds[1:]))
        columns = (chunks.file, chunks.start, chunks.length, chunks.first, chunks.volume)
        return Chunks(box, *(column[rows] for column in columns)), bounds

    def tensor(self, number: int) -> StoredTensor:
        """Return the tensor with this number, with its chunks as objects; they are made once."""
        if number not in self._tensors:
            shape, rows = self.shapes[number], slice(*self.bounds[number : number + 2].tolist())
            chunks = self.chunks.list(rows, self.chunks.box.rows(rows).take_axes(len(shape)), self.files)
            self._tensors[number] = StoredTensor(
                self.dtypes[number], shape, {chunk.box.offset: chunk for chunk in chunks}
            )
        return self._tensors[number]

    def tensor_of(self, key: str) -> ShardedTensor:
        """Return the description of a stored tensor, unsharded and without data."""
        number = self.numbers[key]
        return ShardedTensor.from_global_shape(key, self.dtypes[number], self.shapes[number])
