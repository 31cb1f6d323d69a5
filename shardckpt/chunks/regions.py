"""The reads of a load: regions, which are a box of a stored chunk and the tensor that it is read into, and objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.storage.range_reads import RangeRead
from shardckpt.storage.scatter import StoredArray, find_range
from shardckpt.tensors.raw_memory import view_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from shardckpt.chunks.stored import Chunk, Item
    from shardckpt.planning.boxes import Ints


class Region(NamedTuple):
    """A box of a stored chunk, and the tensor that it is read into.

    Attributes:
        number: Number of the stored tensor.
        chunk: The chunk.
        start: Where the box begins in the chunk, along each axis.
        target: The tensor to fill; its shape is the box's.
        is_entire: Whether the box is the entire chunk.
    """

    number: int
    chunk: Chunk
    start: Ints
    target: torch.Tensor
    is_entire: bool

    @property
    def item(self) -> Item:
        """Where it is stored."""
        return self.chunk.item

    @property
    def nbytes(self) -> int:
        """Bytes of the target, by which reads are shared among threads."""
        return self.target.nbytes

    def find_range(self, payload: int, dtype: torch.dtype, key: str) -> RangeRead | None:
        """Return the range of the file whose bytes fill the target as they are; None if there is no such range.

        ``payload`` is where the payload of the chunk's item begins in the file, in bytes.
        """
        chunk = self.chunk
        first = payload + chunk.first * dtype.itemsize
        offset = find_range(StoredArray(chunk.item.file, first, dtype, chunk.box.shape), self.start, self.target)
        if offset is None:
            return None
        # find_range has found that it takes the bytes as they are
        return RangeRead(chunk.item.file, offset, view_tensor(self.target), key)


class LateRegion(NamedTuple):
    """A region whose target is asked for when it is read. The fields that are not listed are as of :class:`Region`.

    Attributes:
        get_target: Returns the target; the thread that reads the region calls it.
        commit: Takes the target when it is filled.
    """

    number: int
    chunk: Chunk
    start: Ints
    is_entire: bool
    get_target: Callable[[], torch.Tensor]
    commit: Callable[[torch.Tensor], None]

    @property
    def item(self) -> Item:
        """Where it is stored."""
        return self.chunk.item

    @property
    def nbytes(self) -> int:
        """Bytes of the item."""
        return self.chunk.item.length

    def fill(self, target: torch.Tensor) -> Region:
        """Return the region with a target."""
        return Region(self.number, self.chunk, self.start, target, self.is_entire)


class ObjectRead(NamedTuple):
    """An object to read.

    Attributes:
        item: Where it is stored.
        what: A name for it in errors: a key.
        load: Takes its bytes, and puts the object into its place; any thread may call it.
    """

    item: Item
    what: str
    load: Callable[[bytes], None]

    @property
    def nbytes(self) -> int:
        """Bytes of the item."""
        return self.item.length
