"""Shards that are boxes of stored tensors, matched with the chunks by columns, or in lists if they are few."""

from __future__ import annotations

from itertools import compress, repeat
from operator import add, gt, lt, sub
from typing import TYPE_CHECKING

import torch

from shardckpt.chunks.contiguous import ContiguousRegions, FramedRegions
from shardckpt.chunks.read_ahead import SMALL_ITEM
from shardckpt.chunks.regions import Region
from shardckpt.chunks.stored import Chunk, Item
from shardckpt.planning.box_overlaps import Overlaps, find_overlaps
from shardckpt.planning.boxes import Box, FlatPart, part_view, unflattened_box
from shardckpt.planning.table import FEW, Table, count_volumes, find_untiled, make_column, sort_unique
from shardckpt.tensors.memory import find_addresses, is_ordinary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.chunks.contiguous import FindFrames
    from shardckpt.chunks.stored import ChunkIndex, Chunks
    from shardckpt.mapping.sharded_tensor import ShardedTensor
    from shardckpt.planning.boxes import Ints


class FewShards:
    """A few shards, each a part of one stored chunk, as those of most slices: matched without a column.

    ``numbers`` is the number of each one's tensor. ``parts`` has the chunk that has each, and where the shard begins in
    it.
    """

    #: One chunk has all of each shard.
    uncovered: Sequence[ShardedTensor] = ()

    def __init__(
        self, shards: Sequence[ShardedTensor], numbers: Sequence[int], parts: Sequence[tuple[Chunk, Ints]]
    ) -> None:
        self._shards = shards
        self._numbers = numbers
        self._parts = parts

    def list_regions(self) -> list[Region]:
        """Return the regions to read; shards without data get CPU memory."""
        for shard in self._shards:
            if shard.data is None:
                shard.init_data("cpu")
        return [
            Region(number, chunk, start, _view_unflattened(shard), False)
            for shard, number, (chunk, start) in zip(self._shards, self._numbers, self._parts, strict=True)
        ]


def match_few(
    shards: Sequence[ShardedTensor],
    numbers: Sequence[int],
    specs: Sequence[int],
    chunks: Chunks,
    bounds: torch.Tensor,
    files: Sequence[str],
) -> FewShards | None:
    """Match shards that are boxes of stored tensors of the same global shape, if they are few.

    None if they are many, or one is not a part of one chunk that shares no element with another. ``numbers`` is the
    number of each one's tensor, ``specs`` its place among the requested ones.
    """
    if max(len(shards), len(chunks.file)) > FEW:
        return None
    ends = bounds.tolist()
    if sum(ends[spec + 1] - ends[spec] for spec in specs) > FEW:
        return None
    offsets, extents = chunks.box.offset.tolist(), chunks.box.extent.tolist()
    rows: list[int] = []
    boxes: list[Box] = []
    starts: list[Ints] = []
    for shard, spec in zip(shards, specs, strict=True):
        extent = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        before = len(rows)
        for row in range(ends[spec], ends[spec + 1]):
            # columns have as many axes as the tensor with the most
            box = Box(tuple(offsets[row][: len(extent)]), tuple(extents[row][: len(extent)]))
            start = tuple(map(sub, shard.global_offset, box.offset))
            ends_at = tuple(map(add, start, extent))
            if all(map(gt, ends_at, repeat(0))) and all(map(lt, start, box.shape)):
                if extent == box.shape or min(start) < 0 or any(map(gt, ends_at, box.shape)):
                    return None
                rows.append(row)
                boxes.append(box)
                starts.append(start)
        if len(rows) != before + 1 or 0 in extent:
            return None
    places = (chunks.file.tolist(), chunks.start.tolist(), chunks.length.tolist())
    first, volume = chunks.first.tolist(), chunks.volume.tolist()
    parts = []
    for row, box, start in zip(rows, boxes, starts, strict=True):
        file, begin, length = (column[row] for column in places)
        parts.append((Chunk(box, Item(files[file], begin, length), first[row], volume[row]), start))
    return FewShards(shards, numbers, parts)


class MatchedShards:
    """Shards that are boxes of stored tensors of the same global shape, matched by columns.

    ``uncovered`` are those of them whose elements are not all stored exactly once. ``numbers`` is the number of each
    requested tensor in the index, int64.
    """

    def __init__(
        self,
        shards: Sequence[ShardedTensor],
        requested: Table,
        chunks: Chunks,
        bounds: torch.Tensor,
        index: ChunkIndex,
        numbers: torch.Tensor,
    ) -> None:
        found = find_overlaps(requested, chunks.box, bounds)
        covered = _find_covered(requested, found)
        self.uncovered: list[ShardedTensor] = []
        if not bool(covered.all()):
            self.uncovered = list(compress(shards, (~covered).tolist()))
            shards = list(compress(shards, covered.tolist()))
            kept, places = covered[found.wanted], covered.cumsum(0) - 1  # the boxes that stay are numbered anew
            found = Overlaps(places[found.wanted[kept]], found.stored[kept], found.offset[kept], found.extent[kept])
            requested = requested.rows(covered)
        self._shards = shards
        self._chunks = chunks
        self._found = found
        self._requested = requested.pad_axes(found.offset.shape[1])
        self._index = index
        self._numbers = numbers

    def take_contiguous(self) -> ContiguousRegions | None:
        """Take out the contiguous regions of items that are the values of a chunk; None if there are none."""
        contiguous = self._find_contiguous()
        if contiguous is None:
            return None
        itemsizes = make_column([dtype.itemsize for dtype in self._list_dtypes(contiguous.tensor)])
        volume = self._chunks.volume[self._found.stored[contiguous.number]]
        taken = contiguous.select(contiguous.stop - contiguous.start == volume * itemsizes)
        self._leave_out(taken.number)
        return taken

    def take_framed(self, find_frames: FindFrames) -> FramedRegions | None:
        """Take out the contiguous regions of small items that have known bytes around the values of a chunk."""
        contiguous = self._find_contiguous()
        if contiguous is None:
            return None
        chunks, found = self._chunks, self._found
        stored = found.stored[contiguous.number]
        is_small = contiguous.stop - contiguous.start <= SMALL_ITEM
        small = contiguous.select(is_small & (chunks.volume[stored] == chunks.box.volume()[stored]))
        axes = [len(self._index.shapes[number]) for number in small.tensor.tolist()]
        extents = chunks.box.extent[found.stored[small.number]].tolist()  # columns have those of the tensor with most
        shapes = [tuple(extent[:ndim]) for extent, ndim in zip(extents, axes, strict=True)]
        frames = find_frames(self._list_dtypes(small.tensor), shapes, (small.stop - small.start).tolist())
        taken = small.select(torch.tensor([frame is not None for frame in frames], dtype=torch.bool, device="cpu"))
        self._leave_out(taken.number)
        return FramedRegions(taken, [frame for frame in frames if frame is not None])

    def _find_contiguous(self) -> ContiguousRegions | None:
        """Return the regions whose elements follow each other in their chunk, and in memory that takes their bytes."""
        self._allocate()
        found, chunks, requested = self._found, self._chunks, self._requested
        extent, stored = found.extent, chunks.box.pad_axes(found.extent.shape[1])
        is_run = _are_runs(extent, stored.extent[found.stored]) & _are_runs(extent, requested.extent[found.wanted])
        is_run &= chunks.first[found.stored] + stored.volume()[found.stored] <= chunks.volume[found.stored]
        rows = (is_run & (count_volumes(extent) > 0)).nonzero().view(-1)
        if not len(rows):
            return None
        rows = _sort_by_place(rows, chunks, found.stored[rows])
        places, owners = found.stored[rows], found.wanted[rows]
        tensors: list[torch.Tensor] = [self._shards[n].data for n in owners.tolist()]
        numbers = self._numbers[chunks.box.spec[places]]
        dtypes = self._list_dtypes(numbers)
        fits = None
        addresses = find_addresses(tensors) if dtypes == [tensor.dtype for tensor in tensors] else None
        if addresses is None:  # some may be on other devices, have strides or another dtype
            fits = [is_ordinary(t) and t.dtype == dtype for t, dtype in zip(tensors, dtypes, strict=True)]
            addresses = [t.data_ptr() if is_fit else 0 for t, is_fit in zip(tensors, fits, strict=True)]
        itemsize = make_column([dtype.itemsize for dtype in dtypes])
        in_item = chunks.first[places] + _find_first(found.offset[rows], stored.rows(places))
        in_memory = _find_first(found.offset[rows], requested.rows(owners))
        start = chunks.start[places]
        regions = ContiguousRegions(
            chunks.file[places],
            start,
            start + chunks.length[places],
            in_item * itemsize,
            count_volumes(extent[rows]) * itemsize,
            make_column(addresses) + in_memory * itemsize,
            numbers,
            rows,
            self._index.files,
            self._index.keys,
            lambda these: self._make_regions(Overlaps(*(column[these] for column in found))),
        )
        # what an index claims of its chunks may be too large for an int64
        is_sound = (regions.offset >= 0) & (regions.offset + regions.nbytes <= chunks.length[places])
        if fits is not None:
            is_sound &= torch.tensor(fits, dtype=torch.bool, device="cpu")
        return regions.select(is_sound)

    def _list_dtypes(self, numbers: torch.Tensor) -> list[torch.dtype]:
        return [self._index.dtypes[number] for number in numbers.tolist()]

    def _leave_out(self, regions: torch.Tensor) -> None:
        if len(regions):
            stays = torch.ones(len(self._found.wanted), dtype=torch.bool, device="cpu")
            stays[regions] = False
            self._found = Overlaps(*(column[stays] for column in self._found))

    def _allocate(self) -> None:
        for shard in self._shards:
            if shard.data is None:  # a call for each takes time
                shard.init_data("cpu")

    def list_regions(self) -> list[Region]:
        """Return the regions to read; shards without data get CPU memory."""
        self._allocate()
        return self._make_regions(self._found)

    def _make_regions(self, found: Overlaps) -> list[Region]:
        """Return regions as objects; their shards have memory."""
        stored = self._chunks.box.rows(found.stored)
        chunks = self._chunks.list(found.stored, stored, self._index.files)
        columns = (
            found.wanted.tolist(),
            self._requested.offset[found.wanted].tolist(),
            self._numbers[stored.spec].tolist(),
            found.offset.tolist(),
            found.extent.tolist(),
        )
        regions = []
        # By lists: each region becomes an object in any case, and most loads have few that are not entire chunks.
        for requested, begins, number, offset, extent, chunk in zip(*columns, chunks, strict=True):
            target = _view_unflattened(self._shards[requested])
            whole = tuple(target.shape)
            dims = len(whole)
            shape = tuple(extent[:dims])
            if len(chunk.box.shape) > dims:  # columns have as many axes as the tensor with the most
                chunk = chunk._replace(box=Box(chunk.box.offset[:dims], chunk.box.shape[:dims]))  # noqa: PLW2901
            if shape != whole:  # other chunks have the rest of it
                for axis, (size, low, begin) in enumerate(zip(shape, offset, begins, strict=False)):
                    if size != whole[axis]:
                        target = target.narrow(axis, low - begin, size)
            box = chunk.box
            start = tuple(map(sub, offset[:dims], box.offset))
            regions.append(Region(number, chunk, start, target, shape == box.shape))
        return regions


def _find_covered(requested: Table, found: Overlaps) -> torch.Tensor:
    """Return whether all elements of each requested box are stored once: bool of shape (boxes,).

    They are if one chunk has the box, or if the regions that chunks have of it fill it without overlapping.
    """
    wide = requested.pad_axes(found.extent.shape[1])
    if torch.equal(found.extent, wide.extent):
        everything = torch.arange(len(requested.spec), device="cpu")
        if torch.equal(found.wanted, everything):
            return torch.ones_like(everything, dtype=torch.bool)  # each box is one region: most loads are so
    volume = torch.zeros_like(requested.spec).index_add_(0, found.wanted, count_volumes(found.extent))
    covered = volume == requested.volume()
    cut = (found.extent != wide.extent[found.wanted]).any(1)
    if bool(cut.any()):
        # Chunks that overlap may have the right volume and still leave a hole.
        owners = found.wanted[cut]
        boxes = sort_unique(owners)
        regions = Table(torch.searchsorted(boxes, owners), found.offset[cut] - wide.offset[owners], found.extent[cut])
        covered[boxes[find_untiled(regions, list(map(tuple, wide.extent[boxes].tolist())))]] = False
    return covered


def _are_runs(extent: torch.Tensor, container: torch.Tensor) -> torch.Tensor:
    """Return whether boxes are contiguous in the row-major memory of others: bool of shape (n,).

    Both have extents of shape (n, axes). A box is if it has one element along the first axes, any number along the
    next, and all of the other along those that follow.
    """
    if torch.equal(extent, container):
        return extent.new_ones(len(extent), dtype=torch.bool)
    one = extent.new_ones(len(extent), 1)
    ones_before = torch.cat([one, (extent == 1).cumprod(1)], 1)
    full_behind = torch.cat([(extent == container).flip(1).cumprod(1).flip(1), one, one], 1)[:, 1:]
    return (ones_before * full_behind).any(1)


def _find_first(offset: torch.Tensor, box: Table) -> torch.Tensor:
    """Return the place of the element at each global offset, (n, axes), in the row-major memory of a box."""
    ones = box.extent.new_ones(len(box.extent), 1)
    steps = torch.cat([box.extent, ones], 1)[:, 1:].flip(1).cumprod(1).flip(1)
    return ((offset - box.offset) * steps).sum(1)


def _sort_by_place(rows: torch.Tensor, chunks: Chunks, stored: torch.Tensor) -> torch.Tensor:
    """Return rows in the order of their files, and of where their items begin in these, by the chunk of each."""
    file, start = chunks.file[stored], chunks.start[stored]
    if not bool(((file[1:] < file[:-1]) | ((file[1:] == file[:-1]) & (start[1:] < start[:-1]))).any()):
        return rows
    order = start.argsort(stable=True)
    return rows[order[file[order].argsort(stable=True)]]


def _view_unflattened(shard: ShardedTensor) -> torch.Tensor:
    """Return the memory of a shard that is one box, in the shape of the box."""
    if shard.data is None or shard.prepend_axis_num:
        return part_view(shard, FlatPart(unflattened_box(shard), 0))
    return shard.data.detach()
