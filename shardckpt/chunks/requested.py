"""Match requested tensors with stored chunks: the elements of each chunk, and their destinations."""

from __future__ import annotations

from functools import partial
from itertools import compress
from typing import TYPE_CHECKING

import torch

from shardckpt.chunks.casts import check_cast
from shardckpt.chunks.matched import FewShards, MatchedShards, match_few
from shardckpt.chunks.parts import make_finder, match_parts
from shardckpt.chunks.regions import LateRegion, Region
from shardckpt.chunks.staged import StagedDestination, check_no_partial_overlap, needs_staging
from shardckpt.errors import CorruptCheckpointError, KeyMismatchError, listed
from shardckpt.planning.box_overlaps import list_rows
from shardckpt.planning.boxes import FlatPart, part_view
from shardckpt.planning.shapes import check_shapes
from shardckpt.planning.shard_fields import list_boxes, list_fields
from shardckpt.planning.table import make_column, sort_unique
from shardckpt.tensors.memory import ORDINARY, synchronize_devices
from shardckpt.tensors.wrappers import is_quantized, movable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from shardckpt.chunks.contiguous import ContiguousRegions, FindFrames, FramedRegions
    from shardckpt.chunks.stored import Chunk, ChunkIndex
    from shardckpt.mapping.sharded_tensor import ShardedTensor
    from shardckpt.planning.boxes import Ints
    from shardckpt.planning.lookup import BoxFinder
    from shardckpt.storage.reader import CheckpointReader

    #: Regions that one thread reads, one after the other.
    Unit: TypeAlias = Sequence[Region | LateRegion]


class RequestedTensors:
    """Requested shards of stored tensors, and the chunks that have their elements; all is checked, nothing is read.

    Most shards are matched by columns. Those that are flattened or quantized, that may have another global shape, or
    whose elements are not all stored, are matched one by one. The core has compared their dtypes with the stored ones.

    It is a KeyMismatchError if tensors are not stored, a ShapeMismatchError if global shapes differ, a ShardingError if
    torch cannot cast to a shard's dtype, or destinations are views of one quantized tensor, and a
    CorruptCheckpointError if elements are missing or stored twice, or files have fewer bytes than the index says.
    """

    def __init__(self, shards: Sequence[ShardedTensor], index: ChunkIndex, reader: CheckpointReader) -> None:
        numbers = _find_numbers(shards, index)
        column = make_column(numbers)
        self._numbers = sort_unique(column)
        self._index = index
        # a spec is a tensor's place among the requested ones: the selected chunks are numbered so, too
        specs = torch.searchsorted(self._numbers, column)
        self._chunks, self._bounds = index.select_chunks(self._numbers, lambda: list_boxes(shards, specs))
        simple = _find_simple(shards, list(map(index.shapes.__getitem__, numbers)))
        others = [shard for shard, is_simple in zip(shards, simple, strict=True) if not is_simple]
        few = None if others else match_few(shards, numbers, specs.tolist(), self._chunks, self._bounds, index.files)
        if few is not None:
            self._matched: FewShards | MatchedShards = few
        else:
            boxes = list_boxes(shards, specs)
            matched = shards
            if others:
                matched = list(compress(shards, simple))
                boxes = boxes.rows(torch.tensor(simple, dtype=torch.bool, device="cpu"))
            self._matched = MatchedShards(matched, boxes, self._chunks, self._bounds, index, self._numbers)
        others += self._matched.uncovered
        if others:
            check_no_partial_overlap(shard for shard in others if is_quantized(shard.data))
        shapes = [index.shapes[number] for number in self._numbers.tolist()] if others else []
        self._others = self._match_others(others, shapes)
        unallocated = [shard.data is None for shard in shards]
        if any(unallocated):
            self._check_sizes(sort_unique(specs[torch.tensor(unallocated, device="cpu")]), reader)

    def pop_contiguous(self) -> ContiguousRegions | None:
        """Remove and return the regions that are contiguous in items and in memory; None if there are none.

        Call it before :meth:`units`, which then leaves them out, and after all ranks have planned: shards without data
        get CPU memory.
        """
        return None if isinstance(self._matched, FewShards) else self._matched.pop_contiguous()

    def pop_framed(self, find_frames: FindFrames) -> FramedRegions | None:
        """Remove and return regions of small items with known bytes around the values; see :meth:`pop_contiguous`."""
        return None if isinstance(self._matched, FewShards) else self._matched.pop_framed(find_frames)

    def units(self) -> list[Unit]:
        """Return the regions to read, in units that one thread reads, in the order of the files.

        Shards without data get CPU memory, and destinations that may not be covered are zeroed: call it after all ranks
        have planned. It waits until the devices have done the caller's pending work on the destinations. A unit has one
        region, or all those of a staged destination, which needs a plain tensor meanwhile.
        """
        units: list[Unit] = [(region,) for region in self._matched.list_regions()]
        for other in self._others:
            units += other.units()
        # By file and offset: files are read from front to back, and small neighbours at once.
        units.sort(key=lambda unit: unit[0].chunk.item)
        # The reading threads have streams of their own: work of the caller's that uses the destinations must be done.
        synchronize_devices(region.target for unit in units for region in unit if isinstance(region, Region))
        return units

    def _match_others(self, shards: Sequence[ShardedTensor], shapes: Sequence[Ints]) -> list[_OtherShard]:
        if not shards:
            return []
        places = {number: place for place, number in enumerate(self._numbers.tolist())}
        finders: dict[int, tuple[BoxFinder, list[Chunk]]] = {}
        found = []
        for shard in shards:
            number = self._index.numbers[shard.key]
            if number not in finders:
                place = places[number]
                rows = slice(*self._bounds[place : place + 2].tolist())
                boxes = self._chunks.box.rows(rows).first_axes(len(shapes[place]))
                chunks = list(self._chunks.list(rows, boxes, self._index.files))
                finders[number] = make_finder(shard.key, [chunk.box for chunk in chunks]), chunks
            found.append(_OtherShard(shard, number, *finders[number], self._index.dtypes[number]))
        return found

    def _check_sizes(self, specs: torch.Tensor, reader: CheckpointReader) -> None:
        """Check that the files have the bytes of all tensors that the load will allocate memory for.

        A small index could claim a tensor of any size.
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


class _OtherShard:
    """A shard that is matched box by box."""

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
        if staged := self._staged:
            staged.zero_if_empty()
            regions = [
                LateRegion(self._number, chunk, start, entire, partial(staged.view, part, slices), staged.commit)
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
                yield part, chunk, common.offset_in(chunk.box), common.within(part.box), common == chunk.box


def _find_numbers(shards: Sequence[ShardedTensor], index: ChunkIndex) -> list[int]:
    """Return the number of each shard's tensor, after a check that all are stored, with these shapes and dtypes."""
    keys, dtypes, shapes = list_fields(shards, "key", "dtype", "global_shape")
    missing = set(keys) - index.numbers.keys()
    if missing:
        raise KeyMismatchError(f"not in the checkpoint: {listed(sorted(missing))}")
    numbers = list(map(index.numbers.__getitem__, keys))
    if list(shapes) != list(map(index.shapes.__getitem__, numbers)):
        check_shapes(shards, {key: index.shapes[number] for key, number in zip(keys, numbers, strict=True)})
    stored = list(map(index.dtypes.__getitem__, numbers))
    if list(dtypes) != stored:
        for key, dtype, wanted in zip(keys, stored, dtypes, strict=True):
            if dtype != wanted:
                check_cast(key, dtype, wanted)
    return numbers


def _find_simple(shards: Sequence[ShardedTensor], stored: Sequence[Ints]) -> list[bool]:
    """Return whether each shard can be filled region by region, and has the stored global shape."""
    shapes, flat, loose, tensors = list_fields(
        shards, "global_shape", "flattened_range", "allow_shape_mismatch", "data"
    )
    if {*map(type, tensors)} <= {*ORDINARY, type(None)} and not any(loose) and flat.count(None) == len(flat):
        return [True] * len(shards)  # as in most loads; _find_numbers has refused other shapes
    return [
        part is None and not is_loose and not is_quantized(data) and tuple(wanted) == shape
        for shape, wanted, part, is_loose, data in zip(stored, shapes, flat, loose, tensors, strict=True)
    ]
