"""Match requested tensors with stored chunks, by columns: which elements of which chunk go where."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.planning import (
    Box,
    Boxes,
    FlatPart,
    Overlaps,
    find_overlaps,
    find_untiled,
    list_rows,
    part_view,
    sort_unique,
    unflattened_box,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping import ShardedTensor
    from shardckpt.planning import Table
    from shardckpt.storage import CheckpointReader
    from shardckpt_torch_dist.dialects import Chunk, StoredIndex


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
    start: tuple[int, ...]
    target: torch.Tensor
    is_entire: bool


class RequestedTensors:
    """The requested shards whose elements are all stored exactly once, and the chunks that have them.

    Args:
        shards: Unflattened shards of stored tensors, with the stored global shapes.
        index: What is stored.

    Attributes:
        shards: Those of the shards whose elements are all stored once.
        others: The other shards.
    """

    def __init__(self, shards: Sequence[ShardedTensor], index: StoredIndex) -> None:
        self._index = index
        boxes = Boxes()
        for shard in shards:
            boxes.add(index.numbers[shard.key], *unflattened_box(shard))
        requested = boxes.table()
        found = find_overlaps(requested, index.chunks.box, index.bounds)
        covered = _find_covered(requested, found, index)
        self.shards, self.others = list(shards), []
        if not bool(covered.all()):
            self.shards = list(compress(shards, covered.tolist()))
            self.others = list(compress(shards, (~covered).tolist()))
            kept, numbers = covered[found.wanted], covered.cumsum(0) - 1  # the boxes that stay are numbered anew
            found = Overlaps(numbers[found.wanted[kept]], found.stored[kept], found.offset[kept], found.extent[kept])
            requested = requested.rows(covered)
        self._found = found
        self._requested = requested.pad_axes(found.offset.shape[1])

    def check_sizes(self, reader: CheckpointReader) -> None:
        """Check that the files have the bytes of all tensors that the load will allocate memory for.

        Raises:
            CorruptCheckpointError: They do not: a small index could claim a tensor of any size.
        """
        if all(shard.data is not None for shard in self.shards):
            return
        unallocated = torch.tensor([shard.data is None for shard in self.shards], dtype=torch.bool, device="cpu")
        chunks = self._index.chunks
        rows = list_rows(sort_unique(self._requested.spec[unallocated]), self._index.bounds)
        for number in sort_unique(chunks.file[rows]).tolist():
            here = rows[chunks.file[rows] == number]
            size = reader.size(self._index.files[number])
            outside = here[chunks.length[here] > size - chunks.start[here]].tolist()
            if outside:
                start, length = int(chunks.start[outside[0]]), int(chunks.length[outside[0]])
                raise CorruptCheckpointError(
                    f"{self._index.keys[int(chunks.box.spec[outside[0]])]}: bytes {start} to {start + length} are "
                    f"outside {reader.directory / self._index.files[number]} of {size} bytes"
                )

    def regions(self) -> list[Region]:
        """Return the regions to read, in the order of the files; shards without data get CPU memory."""
        for shard in self.shards:
            shard.init_data("cpu")
        views = [
            part_view(shard, FlatPart(unflattened_box(shard), 0))
            if shard.data is None or shard.prepend_axis_num
            else shard.data.detach()
            for shard in self.shards
        ]
        found, axes = self._found, self._requested.offset.shape[1]
        stored = self._index.chunks.box.rows(found.stored).pad_axes(axes)
        entire = (found.extent == stored.extent).all(1).tolist()
        filled = (found.extent == self._requested.extent[found.wanted]).all(1).tolist()
        start = (found.offset - stored.offset).tolist()
        low = (found.offset - self._requested.offset[found.wanted]).tolist()
        extent = found.extent.tolist()
        chunks = self._index.chunks_of(found.stored, stored)
        regions = []
        for row, (requested, number, chunk) in enumerate(
            zip(found.wanted.tolist(), stored.spec.tolist(), chunks, strict=True)
        ):
            target = views[requested]
            dims = target.dim()
            if not filled[row]:
                for axis in range(dims):
                    target = target.narrow(axis, low[row][axis], extent[row][axis])
            # Columns have as many axes as the tensor with the most.
            trimmed = chunk._replace(box=Box(chunk.box.offset[:dims], chunk.box.shape[:dims])) if dims < axes else chunk
            regions.append(Region(number, trimmed, tuple(start[row][:dims]), target, entire[row]))
        # By file and offset: files are read from front to back, and small neighbours at once.
        regions.sort(key=lambda region: region.chunk.item)
        return regions


def _find_covered(requested: Table, found: Overlaps, index: StoredIndex) -> torch.Tensor:
    """Return whether all elements of each requested box are stored once: bool of shape (boxes,).

    They are if one chunk has the box, or if the chunks of the tensor fill the tensor without overlapping.
    """
    volume = torch.zeros_like(requested.spec).index_add_(0, found.wanted, found.extent.prod(1))
    covered = volume == requested.volume()
    alone = (found.extent == requested.pad_axes(found.extent.shape[1]).extent[found.wanted]).all(1)
    if not bool(alone.all()):
        # Chunks that overlap may have the right volume and still leave a hole.
        tensors = sort_unique(requested.spec[found.wanted[~alone]])
        stored = index.chunks.box.rows(list_rows(tensors, index.bounds))
        numbered = stored._replace(spec=torch.searchsorted(tensors, stored.spec))
        wrong = find_untiled(numbered, [index.shapes[number] for number in tensors.tolist()])
        covered &= ~torch.isin(requested.spec, tensors[wrong])
    return covered
