"""Match requested tensors with stored chunks: which elements of which chunk go where."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import torch

from shardckpt.chunks.casts import check_cast
from shardckpt.chunks.parts import make_finder, match_parts
from shardckpt.chunks.regions import Region, StagedRegion
from shardckpt.chunks.staged import StagedDestination, check_no_partial_overlap, needs_staging
from shardckpt.errors import CorruptCheckpointError, KeyMismatchError
from shardckpt.planning import (
    Box,
    Boxes,
    FlatPart,
    Overlaps,
    check_shapes,
    find_overlaps,
    find_untiled,
    list_rows,
    make_column,
    part_view,
    sort_unique,
    unflattened_box,
)
from shardckpt.tensors import is_quantized, movable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from shardckpt.chunks.stored import Chunk, ChunkIndex, Chunks
    from shardckpt.mapping import ShardedTensor
    from shardckpt.planning import BoxFinder, Ints, Table
    from shardckpt.storage import CheckpointReader

    #: Regions that one thread reads, one after the other.
    Unit: TypeAlias = Sequence[Region | StagedRegion]


class RequestedTensors:
    """Requested shards of stored tensors, and the chunks that have their elements; all is checked, nothing is read.

    Most shards are matched by columns. Those that are flattened or quantized, that may have another global shape, or
    whose elements are not all stored, are matched one by one.

    Args:
        shards: The shards; the core has compared their dtypes with the stored ones.
        index: What is stored.
        reader: The checkpoint's files, whose sizes are compared with what the index claims.

    Raises:
        KeyMismatchError: Tensors are not stored.
        ShapeMismatchError: Global shapes differ.
        ShardingError: Torch cannot cast to a shard's dtype, or destinations are views of one quantized tensor.
        CorruptCheckpointError: Elements are missing or stored twice, or files have fewer bytes than the index says.
    """

    def __init__(self, shards: Sequence[ShardedTensor], index: ChunkIndex, reader: CheckpointReader) -> None:
        _check_shards(shards, index)
        everything = make_column([index.numbers[shard.key] for shard in shards])
        self._numbers = sort_unique(everything)
        self._index = index
        self._chunks, self._bounds = index.take_chunks(self._numbers)
        # from here on tensors are numbered by their place among the requested ones, as the chunks are that were taken
        specs = torch.searchsorted(self._numbers, everything)
        shapes = [index.shapes[number] for number in self._numbers.tolist()]
        simple = [_is_simple(shard, shapes[spec]) for shard, spec in zip(shards, specs.tolist(), strict=True)]
        mask = torch.tensor(simple, dtype=torch.bool, device="cpu")
        self._matched = _MatchedShards(list(compress(shards, simple)), specs[mask], shapes, self._chunks, self._bounds)
        others = [shard for shard, is_simple in zip(shards, simple, strict=True) if not is_simple]
        others += self._matched.uncovered
        check_no_partial_overlap(shard for shard in others if is_quantized(shard.data))
        self._others = self._match_others(others, shapes)
        unallocated = [shard.data is None for shard in shards]
        if any(unallocated):
            self._check_sizes(sort_unique(specs[torch.tensor(unallocated, device="cpu")]), reader)

    def units(self) -> list[Unit]:
        """Return the regions to read, in units that one thread reads, in the order of the files.

        Shards without data get CPU memory, and destinations that may not be covered are zeroed: call it after all ranks
        have planned. A unit has one region, or all those of a staged destination, which needs a plain tensor meanwhile.
        """
        units: list[Unit] = [(region,) for region in self._matched.regions(self._index.files, self._numbers.tolist())]
        for other in self._others:
            units += other.units()
        # By file and offset: files are read from front to back, and small neighbours at once.
        units.sort(key=lambda unit: unit[0].chunk.item)
        return units

    def _match_others(self, shards: Iterable[ShardedTensor], shapes: Sequence[Ints]) -> list[_OtherShard]:
        """Match shards one by one."""
        places = {number: place for place, number in enumerate(self._numbers.tolist())}
        finders: dict[int, tuple[BoxFinder, list[Chunk]]] = {}
        found = []
        for shard in shards:
            number = self._index.numbers[shard.key]
            if number not in finders:
                place = places[number]
                rows = slice(*self._bounds[place : place + 2].tolist())
                boxes = self._chunks.box.rows(rows).take_axes(len(shapes[place]))
                chunks = list(self._chunks.list(rows, boxes, self._index.files))
                finders[number] = make_finder(shard.key, [chunk.box for chunk in chunks]), chunks
            found.append(_OtherShard(shard, number, *finders[number], self._index.dtypes[number]))
        return found

    def _check_sizes(self, specs: torch.Tensor, reader: CheckpointReader) -> None:
        """Check that the files have the bytes of all tensors that the load will allocate memory for.

        Raises:
            CorruptCheckpointError: They do not: a small index could claim a tensor of any size.
        """
        chunks = self._chunks
        rows = list_rows(specs, self._bounds)
        for number in sort_unique(chunks.file[rows]).tolist():
            here = rows[chunks.file[rows] == number]
            size = reader.size(self._index.files[number])
            outside = here[chunks.length[here] > size - chunks.start[here]].tolist()
            if outside:
                start, length = int(chunks.start[outside[0]]), int(chunks.length[outside[0]])
                key = self._index.keys[int(self._numbers[chunks.box.spec[outside[0]]])]
                raise CorruptCheckpointError(
                    f"{key}: bytes {start} to {start + length} are "
                    f"outside {reader.directory / self._index.files[number]} of {size} bytes"
                )


class _MatchedShards:
    """Shards that are boxes of stored tensors of the same global shape, matched by columns.

    Args:
        shards: The shards.
        specs: int64 of shape (shards,): the number of each one's tensor.
        shapes: The global shapes of the tensors.
        chunks: Their chunks.
        bounds: Where those of each tensor begin.

    Attributes:
        uncovered: Those of the shards whose elements are not all stored exactly once.
    """

    def __init__(
        self,
        shards: list[ShardedTensor],
        specs: torch.Tensor,
        shapes: Sequence[Ints],
        chunks: Chunks,
        bounds: torch.Tensor,
    ) -> None:
        boxes = Boxes()
        for shard, spec in zip(shards, specs.tolist(), strict=True):
            boxes.add(spec, *unflattened_box(shard))
        requested = boxes.table()
        found = find_overlaps(requested, chunks.box, bounds)
        covered = _find_covered(requested, found, chunks.box, bounds, shapes)
        self.uncovered: list[ShardedTensor] = []
        if not bool(covered.all()):
            self.uncovered = list(compress(shards, (~covered).tolist()))
            shards = list(compress(shards, covered.tolist()))
            kept, numbers = covered[found.wanted], covered.cumsum(0) - 1  # the boxes that stay are numbered anew
            found = Overlaps(numbers[found.wanted[kept]], found.stored[kept], found.offset[kept], found.extent[kept])
            requested = requested.rows(covered)
        self._shards = shards
        self._chunks = chunks
        self._found = found
        self._requested = requested.pad_axes(found.offset.shape[1])

    def regions(self, files: Sequence[str], numbers: Sequence[int]) -> list[Region]:
        """Return the regions to read; shards without data get CPU memory.

        Args:
            files: The names of the files.
            numbers: The number of each tensor in the index.
        """
        for shard in self._shards:
            shard.init_data("cpu")
        views = [
            part_view(shard, FlatPart(unflattened_box(shard), 0))
            if shard.data is None or shard.prepend_axis_num
            else shard.data.detach()
            for shard in self._shards
        ]
        found, axes = self._found, self._requested.offset.shape[1]
        stored = self._chunks.box.rows(found.stored).pad_axes(axes)
        entire = (found.extent == stored.extent).all(1).tolist()
        filled = (found.extent == self._requested.extent[found.wanted]).all(1).tolist()
        start = (found.offset - stored.offset).tolist()
        low = (found.offset - self._requested.offset[found.wanted]).tolist()
        extent = found.extent.tolist()
        chunks = self._chunks.list(found.stored, stored, files)
        regions = []
        for row, (requested, spec, chunk) in enumerate(
            zip(found.wanted.tolist(), stored.spec.tolist(), chunks, strict=True)
        ):
            target = views[requested]
            dims = target.dim()
            if not filled[row]:
                for axis in range(dims):
                    target = target.narrow(axis, low[row][axis], extent[row][axis])
            # Columns have as many axes as the tensor with the most.
            trimmed = chunk._replace(box=Box(chunk.box.offset[:dims], chunk.box.shape[:dims])) if dims < axes else chunk
            regions.append(Region(numbers[spec], trimmed, tuple(start[row][:dims]), target, entire[row]))
        return regions


class _OtherShard:
    """A shard that is matched box by box.

    Args:
        shard: The shard.
        number: The number of its tensor.
        finder: The boxes of the tensor.
        chunks: Its chunks, in the same order.
        dtype: Its stored dtype.
    """

    def __init__(
        self, shard: ShardedTensor, number: int, finder: BoxFinder, chunks: list[Chunk], dtype: torch.dtype
    ) -> None:
        self._shard = shard
        self._number = number
        self._chunks = chunks
        self._found = match_parts(shard, finder)
        self._staged = None
        if shard.data is not None and needs_staging(shard.data, dtype):
            self._staged = StagedDestination(shard, shard.data, sum(map(len, self._found.values())))

    def units(self) -> list[Unit]:
        """Return its regions; see :meth:`RequestedTensors.units`."""
        if self._staged is not None:
            self._staged.zero_if_empty()
            regions = [
                StagedRegion(self._number, chunk, start, self._staged, part, slices, entire)
                for part, chunk, start, slices, entire in self._cut()
            ]
            regions.sort(key=lambda region: region.chunk.item)
            return [regions] if regions else []
        self._shard.init_data("cpu")
        views = {part: part_view(self._shard, part) for part in self._found}
        if self._shard.allow_shape_mismatch:
            for view in views.values():
                movable(view).zero_()  # torch has no kernel for packed dtypes, but their zeros are zero bytes
        return [
            (Region(self._number, chunk, start, views[part][slices], entire),)
            for part, chunk, start, slices, entire in self._cut()
        ]

    def _cut(self) -> Iterable[tuple[FlatPart, Chunk, Ints, tuple[slice, ...], bool]]:
        """Yield the part, the chunk, where the common box begins in it, where it lies in the part, and if it is all."""
        for part, touched in self._found.items():
            for place, common in touched:
                chunk = self._chunks[place]
                start = tuple(a - b for a, b in zip(common.offset, chunk.box.offset, strict=True))
                yield part, chunk, start, common.within(part.box), common == chunk.box


def _check_shards(shards: Sequence[ShardedTensor], index: ChunkIndex) -> None:
    """Check that all tensors are stored, with the global shapes of the shards, and can be cast to their dtypes."""
    missing = sorted({shard.key for shard in shards if shard.key not in index.numbers})
    if missing:
        raise KeyMismatchError(f"not in the checkpoint: {', '.join(missing)}")
    numbers = {shard.key: index.numbers[shard.key] for shard in shards}
    check_shapes(shards, {key: index.shapes[number] for key, number in numbers.items()})
    for shard in shards:
        stored = index.dtypes[numbers[shard.key]]
        if stored != shard.dtype:
            check_cast(shard.key, stored, shard.dtype)


def _is_simple(shard: ShardedTensor, shape: Ints) -> bool:
    """Return whether a shard can be filled region by region, and has the stored global shape."""
    if shard.flattened_range is not None or shard.allow_shape_mismatch or is_quantized(shard.data):
        return False
    return shape == tuple(shard.global_shape)


def _find_covered(
    requested: Table, found: Overlaps, stored: Table, bounds: torch.Tensor, shapes: Sequence[Ints]
) -> torch.Tensor:
    """Return whether all elements of each requested box are stored once: bool of shape (boxes,).

    They are if one chunk has the box, or if the chunks of the tensor fill the tensor without overlapping.
    """
    volume = torch.zeros_like(requested.spec).index_add_(0, found.wanted, found.extent.prod(1))
    covered = volume == requested.volume()
    alone = (found.extent == requested.pad_axes(found.extent.shape[1]).extent[found.wanted]).all(1)
    if not bool(alone.all()):
        # Chunks that overlap may have the right volume and still leave a hole.
        tensors = sort_unique(requested.spec[found.wanted[~alone]])
        rows = stored.rows(list_rows(tensors, bounds))
        numbered = rows._replace(spec=torch.searchsorted(tensors, rows.spec))
        wrong = find_untiled(numbered, [shapes[number] for number in tensors.tolist()])
        covered &= ~torch.isin(requested.spec, tensors[wrong])
    return covered
