"""Shards that are boxes of stored tensors, matched with the chunks by columns, or in lists if they are few."""

from __future__ import annotations

from itertools import compress
from operator import sub
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.chunks.contiguous import ContiguousRegions, FramedRegions
from shardckpt.chunks.read_ahead import SMALL_ITEM
from shardckpt.chunks.regions import Region
from shardckpt.planning.box_overlaps import Overlaps, find_overlaps
from shardckpt.planning.boxes import Box, FlatPart, intersect, part_view, unflattened_box
from shardckpt.planning.table import FEW, Table, count_volumes, find_untiled, make_column, sort_unique
from shardckpt.tensors.memory import find_addresses, is_ordinary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from shardckpt.chunks.contiguous import FindFrames
    from shardckpt.chunks.stored import Chunk, ChunkIndex, Chunks
    from shardckpt.mapping.sharded_tensor import ShardedTensor
    from shardckpt.planning.boxes import Ints

#: Numbers of elements below it are exact in float64, and as bytes in int64.
_MOST_ELEMENTS = 1 << 53
_MOST_BYTES = (1 << 63) - 1


class _Part(NamedTuple):
    """A shard, the number of its tensor, the chunk that has all its elements, and where it begins in the chunk."""

    shard: ShardedTensor
    number: int
    chunk: Chunk
    start: Ints


class FewShards:
    """A few shards, each a part of one chunk, as those of most slices: columns would take longer than the reads.

    Attributes:
        uncovered: The shards whose elements are not all stored exactly once: none.
    """

    uncovered: Sequence[ShardedTensor] = ()

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts = parts

    def list_regions(self) -> list[Region]:
        """Return the regions to read; shards without data get CPU memory."""
        _allocate(part.shard for part in self._parts)
        return [
            Region(part.number, part.chunk, part.start, _view_unflattened(part.shard), is_entire=False)
            for part in self._parts
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

    Return None, so that the caller uses :class:`MatchedShards`, if there are more than ``FEW`` shards or chunks, or if
    a shard is an entire chunk, or has elements of several chunks or of none.

    Args:
        shards: The shards.
        numbers: The number of each one's tensor in the index.
        specs: The place of each one's tensor among the requested ones.
        chunks: The chunks of the requested tensors.
        bounds: As :meth:`ChunkIndex.select_chunks` returns them.
        files: The names of the files, by number.
    """
    ends = bounds.tolist()
    if max(len(shards), len(chunks.file), sum(ends[spec + 1] - ends[spec] for spec in specs)) > FEW:
        return None
    stored = list(chunks.list(slice(None), chunks.box, files))
    parts = []
    for shard, number, spec in zip(shards, numbers, specs, strict=True):
        wanted = unflattened_box(shard)
        axes = len(wanted.shape)  # columns have as many as the tensor with the most
        candidates = [_cut_axes(chunk, axes) for chunk in stored[ends[spec] : ends[spec + 1]]]
        touched = [(chunk, common) for chunk in candidates if (common := intersect(wanted, chunk.box))]
        if len(touched) != 1:
            return None
        ((chunk, common),) = touched
        if common != wanted or common == chunk.box:
            return None
        parts.append(_Part(shard, number, chunk, wanted.offset_in(chunk.box)))
    return FewShards(parts)


class MatchedShards:
    """Shards that are boxes of stored tensors of the same global shape, matched by columns.

    Args:
        shards: The shards.
        requested: The box of each; tensors are numbered by their places among the requested ones.
        chunks: The chunks of the requested tensors.
        bounds: As :meth:`ChunkIndex.select_chunks` returns them.
        index: The checkpoint's tensors.
        numbers: The number of each requested tensor in the index, int64.

    Attributes:
        uncovered: The shards whose elements are not all stored exactly once. They are not matched.
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
            kept = covered[found.wanted]
            places = covered.cumsum(0) - 1  # the new number of each box that stays
            found = Overlaps(places[found.wanted[kept]], found.stored[kept], found.offset[kept], found.extent[kept])
            requested = requested.rows(covered)
        self._shards = shards
        self._chunks = chunks
        self._found = found
        self._requested = requested.pad_axes(found.offset.shape[1])
        self._index = index
        self._numbers = numbers

    def pop_contiguous(self) -> ContiguousRegions | None:
        """Remove and return the contiguous regions of items that are the values of a chunk; None if there are none.

        Shards without data get CPU memory.
        """
        _allocate(self._shards)
        regions = self._find_contiguous()
        if regions is None:
            return None
        itemsizes = make_column([dtype.itemsize for dtype in self._list_dtypes(regions.tensor)])
        volume = self._chunks.volume[self._found.stored[regions.row]]
        popped = regions.select(regions.stop - regions.start == volume * itemsizes)
        return popped if self._remove(popped.row) else None

    def pop_framed(self, find_frames: FindFrames) -> FramedRegions | None:
        """Remove and return the contiguous regions of small items that have known bytes around the values of a chunk.

        None if there are none. Shards without data get CPU memory.
        """
        _allocate(self._shards)
        regions = self._find_contiguous(SMALL_ITEM)
        if regions is None:
            return None
        chunks, found = self._chunks, self._found
        chunk_rows = found.stored[regions.row]
        small = regions.select(chunks.volume[chunk_rows] == chunks.box.volume()[chunk_rows])
        axes = [len(self._index.shapes[number]) for number in small.tensor.tolist()]
        extents = chunks.box.extent[found.stored[small.row]].tolist()  # with as many axes as the tensor with the most
        shapes = [tuple(extent[:ndim]) for extent, ndim in zip(extents, axes, strict=True)]
        frames = find_frames(self._list_dtypes(small.tensor), shapes, (small.stop - small.start).tolist())
        popped = small.select(torch.tensor([frame is not None for frame in frames], dtype=torch.bool, device="cpu"))
        if not self._remove(popped.row):
            return None
        return FramedRegions(popped, [frame for frame in frames if frame is not None])

    def list_regions(self) -> list[Region]:
        """Return the regions that were not removed; shards without data get CPU memory."""
        _allocate(self._shards)
        return self._make_regions(self._found)

    def _find_contiguous(self, most_bytes: int = _MOST_BYTES) -> ContiguousRegions | None:
        """Return the regions whose elements follow each other in their chunk, and in memory that takes their bytes.

        Those of larger items than ``most_bytes`` are left out. None if there are none.
        """
        found, chunks = self._found, self._chunks
        is_read = self._find_contiguous_rows() & (chunks.length[found.stored] <= most_bytes)
        rows = is_read.nonzero().view(-1)
        rows = _sort_by_place(rows, chunks, found.stored[rows])
        numbers = self._numbers[chunks.box.spec[found.stored[rows]]]
        dtypes = self._list_dtypes(numbers)
        tensors = [self._shards[row].data for row in found.wanted[rows].tolist()]
        address = make_column(_find_addresses(tensors, dtypes))
        takes_bytes = address != 0
        if not bool(takes_bytes.all()):
            rows, numbers, address = rows[takes_bytes], numbers[takes_bytes], address[takes_bytes]
            dtypes = list(compress(dtypes, takes_bytes.tolist()))
        if not dtypes:
            return None
        chunk_rows, shard_rows = found.stored[rows], found.wanted[rows]
        itemsize = make_column([dtype.itemsize for dtype in dtypes])
        offset = found.offset[rows]
        regions = ContiguousRegions(
            file=chunks.file[chunk_rows],
            start=chunks.start[chunk_rows],
            stop=chunks.start[chunk_rows] + chunks.length[chunk_rows],
            offset=(chunks.first[chunk_rows] + _find_element(offset, chunks.box.rows(chunk_rows))) * itemsize,
            nbytes=count_volumes(found.extent[rows]) * itemsize,
            address=address + _find_element(offset, self._requested.rows(shard_rows)) * itemsize,
            tensor=numbers,
            row=rows,
            files=self._index.files,
            keys=self._index.keys,
            make_regions=lambda these: self._make_regions(Overlaps(*(column[these] for column in found))),
        )
        return regions.select(regions.offset + regions.nbytes <= chunks.length[chunk_rows])

    def _find_contiguous_rows(self) -> torch.Tensor:
        """Return whether the elements of each region follow each other in its chunk and in its shard: bool.

        It is False for a chunk that claims more elements than its item has, which :meth:`ItemReader.read_region`
        refuses, or too many for exact arithmetic.
        """
        extent, chunks = self._found.extent, self._chunks
        chunk_rows, shard_rows = self._found.stored, self._found.wanted
        axes = extent.shape[1]
        claimed = chunks.first.double() + chunks.box.extent.double().prod(1)
        is_sound = (chunks.first >= 0) & (claimed <= chunks.volume) & (chunks.volume < _MOST_ELEMENTS)
        return (
            _are_contiguous_in(extent, chunks.box.pad_axes(axes).extent[chunk_rows])
            & _are_contiguous_in(extent, self._requested.extent[shard_rows])
            & is_sound[chunk_rows]
            & (extent > 0).all(1)
        )

    def _list_dtypes(self, numbers: torch.Tensor) -> list[torch.dtype]:
        return [self._index.dtypes[number] for number in numbers.tolist()]

    def _remove(self, rows: torch.Tensor) -> bool:
        """Remove some of the regions; return whether there are such."""
        if not len(rows):
            return False
        stays = torch.ones(len(self._found.wanted), dtype=torch.bool, device="cpu")
        stays[rows] = False
        self._found = Overlaps(*(column[stays] for column in self._found))
        return True

    def _make_regions(self, found: Overlaps) -> list[Region]:
        """Return regions as objects; their shards have memory."""
        boxes = self._chunks.box.rows(found.stored)
        chunks = self._chunks.list(found.stored, boxes, self._index.files)
        columns = (
            found.wanted.tolist(),
            self._requested.offset[found.wanted].tolist(),
            self._numbers[boxes.spec].tolist(),
            found.offset.tolist(),
            found.extent.tolist(),
        )
        regions = []
        # by lists: each region becomes an object in any case, and of most loads few are left
        for shard_row, shard_offset, number, offset, extent, wide_chunk in zip(*columns, chunks, strict=True):
            target = _view_unflattened(self._shards[shard_row])
            axes = target.ndim
            chunk, shape = _cut_axes(wide_chunk, axes), tuple(extent[:axes])
            if shape != target.shape:  # other chunks have the rest of it
                for axis, length in enumerate(shape):
                    target = target.narrow(axis, offset[axis] - shard_offset[axis], length)
            start = tuple(map(sub, offset[:axes], chunk.box.offset))
            regions.append(Region(number, chunk, start, target, shape == chunk.box.shape))
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


def _are_contiguous_in(extent: torch.Tensor, container: torch.Tensor) -> torch.Tensor:
    """Return whether boxes are contiguous in the row-major memory of others: bool of shape (n,).

    Both have extents of shape (n, axes). A box is contiguous if there is an axis before which its extent is 1, and
    behind which its extent is the container's.
    """
    if torch.equal(extent, container):
        return extent.new_ones(len(extent), dtype=torch.bool)
    # a column for each axis, and one more: a 0-D box has no axis, and is contiguous
    ones = extent.new_ones(len(extent), 1)
    is_one_before = torch.cat([ones, (extent == 1).cumprod(1)], 1)
    is_full_behind = torch.cat([(extent == container).flip(1).cumprod(1).flip(1), ones, ones], 1)[:, 1:]
    return (is_one_before * is_full_behind).any(1)


def _find_element(offset: torch.Tensor, box: Table) -> torch.Tensor:
    """Return the number of the element at each global offset, (n, axes), in the row-major memory of its box."""
    box = box.pad_axes(offset.shape[1])
    ones = box.extent.new_ones(len(box.extent), 1)
    steps = torch.cat([box.extent, ones], 1)[:, 1:].flip(1).cumprod(1).flip(1)
    return ((offset - box.offset) * steps).sum(1)


def _find_addresses(tensors: list[Any], dtypes: list[torch.dtype]) -> list[int]:
    """Return the address of each tensor's memory; 0 if the memory does not take the bytes of a dtype as they are."""
    addresses = find_addresses(tensors) if dtypes == [tensor.dtype for tensor in tensors] else None
    if addresses is not None:
        return addresses
    # some may be on other devices, have strides or another dtype
    return [
        tensor.data_ptr() if tensor.dtype == dtype and is_ordinary(tensor) else 0
        for tensor, dtype in zip(tensors, dtypes, strict=True)
    ]


def _allocate(shards: Iterable[ShardedTensor]) -> None:
    for shard in shards:
        if shard.data is None:  # a call for each takes time
            shard.init_data("cpu")


def _cut_axes(chunk: Chunk, axes: int) -> Chunk:
    """Return a chunk without the axes that its tensor does not have: columns have those of the tensor with the most."""
    box = chunk.box
    return chunk if len(box.shape) == axes else chunk._replace(box=Box(box.offset[:axes], box.shape[:axes]))


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
