"""The stored tensors of a checkpoint, as columns: the boxes of each tensor, and the items of files that hold them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.planning.boxes import Box
from shardckpt.strategy import StoredBox

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from shardckpt.planning.boxes import Ints
    from shardckpt.planning.table import Table


class Item(NamedTuple):
    """A byte range of a file that holds one stored value. Items sort by file, then by offset."""

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

    def find_bytes(self, dtype: torch.dtype) -> tuple[int, int] | None:
        """Return the offset of the box in its file, and its number of bytes; None if it is not inside of its item.

        The bytes of the item are elements of this dtype, and nothing else.
        """
        offset, nbytes = self.first * dtype.itemsize, self.box.volume * dtype.itemsize
        return (self.item.offset + offset, nbytes) if 0 <= offset <= self.item.length - nbytes else None


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor: its dtype, its true global shape, and its chunks by their offsets in it."""

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

        ``rows`` are int64 indices of shape (rows,), or a slice. ``boxes`` are their boxes, with as many axes as the
        result is to have. ``files`` are the names of the files, by number.
        """
        items = map(
            Item,
            map(files.__getitem__, self.file[rows].tolist()),
            self.start[rows].tolist(),
            self.length[rows].tolist(),
        )
        corners = (map(tuple, column.tolist()) for column in (boxes.offset, boxes.extent))
        return map(Chunk, map(Box, *corners), items, self.first[rows].tolist(), self.volume[rows].tolist())


class ChunkIndex(ABC):
    """The tensors of a checkpoint. A tensor's number is its position in ``keys``. A base of the indexes of formats.

    Attributes:
        keys: The keys of the tensors.
        dtypes: Their dtypes.
        shapes: Their true global shapes.
        files: The names of the data files, in the order of their numbers.
    """

    keys: Sequence[str]
    dtypes: Sequence[torch.dtype]
    shapes: Sequence[Ints]
    files: Sequence[str]

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each tensor, by key."""
        return {key: number for number, key in enumerate(self.keys)}

    def list_boxes(self) -> Iterator[StoredBox]:
        """Yield the boxes of all tensors with their files, by each name of a tensor."""
        chunks, bounds = self.select_chunks(torch.arange(len(self.keys), device="cpu"))
        columns = (chunks.box.offset.tolist(), chunks.box.extent.tolist(), chunks.file.tolist())
        rows = list(zip(*columns, strict=True))
        ends = bounds.tolist()
        for key, number in self.numbers.items():
            axes = len(self.shapes[number])
            for offset, extent, file in rows[ends[number] : ends[number + 1]]:
                yield StoredBox(key, tuple(offset[:axes]), tuple(extent[:axes]), self.files[file])

    @abstractmethod
    def select_chunks(
        self, numbers: torch.Tensor, wanted: Callable[[], Table] | None = None
    ) -> tuple[Chunks, torch.Tensor]:
        """Return the chunks of some tensors, numbered anew, and their bounds; a format may check them first.

        Args:
            numbers: int64 of shape (n,): the tensors, ascending, each once.
            wanted: Makes boxes in these tensors, each with the place of its tensor in ``numbers``; None for all. Chunks
                that share no element with any of them may be left out.

        Returns:
            The chunks as int64 columns, with tensors numbered by their place in ``numbers``; and bounds, int64 of shape
            (n + 1,): the tensor at place ``p`` has the rows ``bounds[p]`` to ``bounds[p + 1]``.
        """
