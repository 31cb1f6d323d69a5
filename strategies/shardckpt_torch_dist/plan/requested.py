"""Wanted tensors matched with what is stored, by columns: which elements of which chunk go where."""

from __future__ import annotations

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
    from shardckpt_torch_dist.dialects import Chunk, Item, StoredIndex


class Region(NamedTuple):
    """Elements of a stored chunk, and the tensor that they go to.

    Attributes:
        number: Of the stored tensor.
        chunk: The chunk.
        start: Where they begin in the chunk, along every axis.
        target: Of their shape.
        whole: Whether they are all elements of the chunk.
    """

    number: int
    chunk: Chunk
    start: tuple[int, ...]
    target: torch.Tensor
    whole: bool


class WantedTensors:
    """Shards whose every element is stored exactly once.

    Args:
        shards: Unflattened shards of tensors that are stored, under the same global shape.
        index: What is stored.
    """

    def __init__(self, shards: Sequence[ShardedTensor], index: StoredIndex) -> None:
        self._index = index
        boxes = Boxes()
        for shard in shards:
            boxes.add(index.numbers[shard.key], *unflattened_box(shard))
        wanted = boxes.table()
        found = find_overlaps(wanted, index.chunks.box, index.bounds)
        sound = _covered(wanted, found, index)
        #: Those that are stored so, and the others.
        self.shards, self.others = list(shards), []
        if not bool(sound.all()):
            self.shards = [shard for shard, good in zip(shards, sound.tolist(), strict=True) if good]
            self.others = [shard for shard, good in zip(shards, sound.tolist(), strict=True) if not good]
            wanted, found = wanted.rows(sound), _kept(found, sound)
        self._found = found
        self._wanted = wanted.pad_axes(found.offset.shape[1])

    def check_sizes(self, reader: CheckpointReader) -> None:
        """Whether the files have the bytes of the tensors that memory is to be allocated for.

        Raises:
            CorruptCheckpointError: they do not.
        """
        if all(shard.data is not None for shard in self.shards):
            return
        without = torch.tensor([shard.data is None for shard in self.shards], dtype=torch.bool, device="cpu")
        chunks = self._index.chunks
        rows = list_rows(sort_unique(self._wanted.spec[without]), self._index.bounds)
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
        """All regions, in the order of the files; shards that have no memory get some."""
        for shard in self.shards:
            shard.init_data("cpu")
        views = [_view(shard) for shard in self.shards]
        found, axes = self._found, self._wanted.offset.shape[1]
        stored = self._index.chunks.box.rows(found.stored).pad_axes(axes)
        entire = (found.extent == stored.extent).all(1).tolist()
        filled = (found.extent == self._wanted.extent[found.wanted]).all(1).tolist()
        start = (found.offset - stored.offset).tolist()
        low = (found.offset - self._wanted.offset[found.wanted]).tolist()
        extent = found.extent.tolist()
        chunks = self._index.chunks_of(found.stored, stored)
        regions = []
        for place, (wanted, number, chunk) in enumerate(
            zip(found.wanted.tolist(), stored.spec.tolist(), chunks, strict=True)
        ):
            target = views[wanted]
            dims = target.dim()
            if not filled[place]:
                for axis in range(dims):
                    target = target.narrow(axis, low[place][axis], extent[place][axis])
            stored_chunk = chunk if dims == axes else _with_axes(chunk, dims)
            regions.append(Region(number, stored_chunk, tuple(start[place][:dims]), target, entire[place]))
        regions.sort(key=_place)
        return regions


def _place(region: Region) -> Item:
    """Where it is read; places sort by file and offset."""
    return region.chunk.item


def _view(shard: ShardedTensor) -> torch.Tensor:
    """The shard's memory in the shape of its box."""
    if shard.data is not None and not shard.prepend_axis_num:
        return shard.data.detach()
    return part_view(shard, FlatPart(unflattened_box(shard), 0))


def _with_axes(chunk: Chunk, dims: int) -> Chunk:
    """A chunk without the axes that it has only because others have more."""
    return chunk._replace(box=Box(chunk.box.offset[:dims], chunk.box.shape[:dims]))


def _kept(found: Overlaps, sound: torch.Tensor) -> Overlaps:
    """The overlaps of those wanted boxes that are sound, numbered without the others."""
    number, kept = sound.cumsum(0) - 1, sound[found.wanted]
    return Overlaps(number[found.wanted[kept]], found.stored[kept], found.offset[kept], found.extent[kept])


def _covered(wanted: Table, found: Overlaps, index: StoredIndex) -> torch.Tensor:
    """Whether every element of each wanted box is stored once: in a chunk of that box, or in chunks that tile all."""
    volume = torch.zeros_like(wanted.spec).index_add_(0, found.wanted, found.extent.prod(1))
    sound = volume == wanted.volume()
    alone = (found.extent == wanted.pad_axes(found.extent.shape[1]).extent[found.wanted]).all(1)
    if not bool(alone.all()):
        specs = sort_unique(wanted.spec[found.wanted[~alone]])
        stored = index.chunks.box.rows(list_rows(specs, index.bounds))
        numbered = stored._replace(spec=torch.searchsorted(specs, stored.spec))
        wrong = find_untiled(numbered, [index.shapes[number] for number in specs.tolist()])
        sound &= ~torch.isin(wanted.spec, specs[wrong])
    return sound


__all__ = ["Region", "WantedTensors"]
