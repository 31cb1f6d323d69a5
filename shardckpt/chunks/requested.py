"""Match requested tensors with stored chunks: the elements of each chunk, and their destinations."""

from __future__ import annotations

from functools import partial
from itertools import compress, repeat
from operator import add, gt, lt, sub
from typing import TYPE_CHECKING

import torch

from shardckpt.chunks.casts import check_cast
from shardckpt.chunks.entire import EntireChunks
from shardckpt.chunks.parts import make_finder, match_parts
from shardckpt.chunks.read_ahead import SMALL_ITEM
from shardckpt.chunks.regions import LateRegion, Region
from shardckpt.chunks.staged import StagedDestination, check_no_partial_overlap, needs_staging
from shardckpt.chunks.stored import Chunk, Item
from shardckpt.errors import CorruptCheckpointError, KeyMismatchError, listed
from shardckpt.planning.box_overlaps import Overlaps, find_overlaps, list_rows
from shardckpt.planning.boxes import Box, FlatPart, part_view, unflattened_box
from shardckpt.planning.shapes import check_shapes
from shardckpt.planning.shard_fields import list_boxes, list_fields
from shardckpt.planning.table import FEW, Table, count_volumes, find_untiled, make_column, sort_unique
from shardckpt.tensors.memory import ORDINARY, find_addresses, is_ordinary, synchronize_devices
from shardckpt.tensors.wrappers import is_quantized, movable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import TypeAlias

    from shardckpt.chunks.entire import FindFrames, Frame
    from shardckpt.chunks.stored import ChunkIndex, Chunks
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
        everything = make_column(numbers)
        self._numbers = sort_unique(everything)
        self._index = index
        # from here on tensors are numbered by their place among the requested ones, as the chunks are that are taken
        specs = torch.searchsorted(self._numbers, everything)
        self._chunks, self._bounds = index.select_chunks(self._numbers, lambda: list_boxes(shards, specs))
        simple = _find_simple(shards, list(map(index.shapes.__getitem__, numbers)))
        others = [shard for shard, is_simple in zip(shards, simple, strict=True) if not is_simple]
        few = None if others else _match_few(shards, specs.tolist(), self._chunks, self._bounds, index.files)
        if few is not None:
            self._matched: _FewShards | _MatchedShards = few
        else:
            boxes = list_boxes(shards, specs)
            matched = shards
            if others:
                matched = list(compress(shards, simple))
                boxes = boxes.rows(torch.tensor(simple, dtype=torch.bool, device="cpu"))
            self._matched = _MatchedShards(matched, boxes, self._chunks, self._bounds)
        others += self._matched.uncovered
        if others:
            check_no_partial_overlap(shard for shard in others if is_quantized(shard.data))
        shapes = [index.shapes[number] for number in self._numbers.tolist()] if others else []
        self._others = self._match_others(others, shapes)
        unallocated = [shard.data is None for shard in shards]
        if any(unallocated):
            self._check_sizes(sort_unique(specs[torch.tensor(unallocated, device="cpu")]), reader)

    def split_entire(self, find_frames: FindFrames | None) -> EntireChunks | None:
        """Return those of the chunks that are read entirely into the memory of a shard, or None if there are none.

        With ``find_frames`` only small ones are. Call it before :meth:`units`, which then leaves them out, and after
        all ranks have planned: shards without data get CPU memory.
        """
        return self._matched.split_entire(self._index, self._numbers, find_frames)

    def units(self) -> list[Unit]:
        """Return the regions to read, in units that one thread reads, in the order of the files.

        Shards without data get CPU memory, and destinations that may not be covered are zeroed: call it after all ranks
        have planned. It waits until the devices have done what the caller began with the destinations. A unit has one
        region, or all those of a staged destination, which needs a plain tensor meanwhile.
        """
        units: list[Unit] = [(region,) for region in self._matched.regions(self._index.files, self._numbers)]
        for other in self._others:
            units += other.units()
        # By file and offset: files are read from front to back, and small neighbours at once.
        units.sort(key=lambda unit: unit[0].chunk.item)
        # The reading threads have streams of their own: work of the caller's that uses the destinations must be done.
        synchronize_devices(region.target for unit in units for region in unit if isinstance(region, Region))
        return units

    def _match_others(self, shards: Sequence[ShardedTensor], shapes: Sequence[Ints]) -> list[_OtherShard]:
        """Match shards one by one."""
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


class _FewShards:
    """A few shards, each a part of one stored chunk, as those of most slices: matched without a column.

    ``specs`` is the place of each one's tensor among the requested ones. ``parts`` has the chunk that has each, and
    where the shard begins in it.
    """

    #: One chunk has all of each shard.
    uncovered: Sequence[ShardedTensor] = ()

    def __init__(
        self, shards: Sequence[ShardedTensor], specs: Sequence[int], parts: Sequence[tuple[Chunk, Ints]]
    ) -> None:
        self._shards = shards
        self._specs = specs
        self._parts = parts

    def split_entire(self, *_: object) -> None:
        """Return None: no shard is an entire chunk."""

    def regions(self, _files: Sequence[str], numbers: torch.Tensor) -> list[Region]:
        """Return the regions to read; see :meth:`_MatchedShards.regions`."""
        for shard in self._shards:
            if shard.data is None:
                shard.init_data("cpu")
        return [
            Region(int(numbers[spec]), chunk, start, _view_unflattened(shard), False)
            for shard, spec, (chunk, start) in zip(self._shards, self._specs, self._parts, strict=True)
        ]


class _MatchedShards:
    """Shards that are boxes of stored tensors of the same global shape, matched by columns.

    ``uncovered`` are those of them whose elements are not all stored exactly once.
    """

    def __init__(self, shards: Sequence[ShardedTensor], requested: Table, chunks: Chunks, bounds: torch.Tensor) -> None:
        found = find_overlaps(requested, chunks.box, bounds)
        covered = _find_covered(requested, found)
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

    def split_entire(
        self, index: ChunkIndex, numbers: torch.Tensor, find_frames: FindFrames | None
    ) -> EntireChunks | None:
        """Take out the regions that are entire chunks, and fill shards as the files have them; see the base.

        Returns the chunks, whose bytes go straight into the shards; None if no region is an entire chunk. ``numbers``
        is the number of each tensor in the index, int64.
        """
        self._allocate()
        found, chunks = self._found, self._chunks
        volume = count_volumes(found.extent)
        if len(volume) <= FEW:  # of a slice none is: three calls tell, where the mask takes ten
            whole = chunks.box.volume()[found.stored].tolist()
            if not any(count == most > 0 for count, most in zip(volume.tolist(), whole, strict=True)):
                return None
        is_entire = (volume == chunks.box.volume()[found.stored]) & (volume == self._requested.volume()[found.wanted])
        is_entire &= (volume == chunks.volume[found.stored]) & (volume > 0)
        rows = is_entire.nonzero().view(-1)
        if not len(rows):
            return None
        number = numbers[chunks.box.spec[found.stored[rows]]]
        tensors: list[torch.Tensor] = [self._shards[n].data for n in found.wanted[rows].tolist()]
        stored = [index.dtypes[n] for n in number.tolist()]
        length = chunks.length[found.stored[rows]]
        if find_frames is None:
            takes_bytes = length == volume[rows] * make_column([dtype.itemsize for dtype in stored])
        else:
            takes_bytes = length <= SMALL_ITEM
        addresses = find_addresses(tensors) if stored == [tensor.dtype for tensor in tensors] else None
        if addresses is None:  # some may be on other devices, have strides or another dtype
            fits = [is_ordinary(t) and t.dtype == dtype for t, dtype in zip(tensors, stored, strict=True)]
            takes_bytes &= torch.tensor(fits, dtype=torch.bool, device="cpu")
            addresses = [t.data_ptr() if is_fit else 0 for t, is_fit in zip(tensors, fits, strict=True)]
        frames: Sequence[Frame | None] = ()
        if find_frames is not None:
            small = takes_bytes.nonzero().view(-1)
            axes = (len(index.shapes[n]) for n in number[small].tolist())  # columns have those of the tensor with most
            shapes = [tuple(e[:ndim]) for e, ndim in zip(found.extent[rows[small]].tolist(), axes, strict=True)]
            frames = find_frames([stored[n] for n in small.tolist()], shapes, length[small].tolist())
            takes_bytes[small] = torch.tensor([frame is not None for frame in frames], dtype=torch.bool, device="cpu")
        taken = rows[takes_bytes]
        is_entire[rows] = takes_bytes
        if len(taken):
            self._found = Overlaps(*(column[~is_entire] for column in found))
        return EntireChunks(
            chunks.file[found.stored[taken]],
            chunks.start[found.stored[taken]],
            length[takes_bytes],
            make_column(addresses)[takes_bytes],
            number[takes_bytes],
            taken,
            index.files,
            index.keys,
            lambda regions: self._list_regions(Overlaps(*(column[regions] for column in found)), index.files, numbers),
            [frame for frame in frames if frame is not None],
        )

    def _allocate(self) -> None:
        for shard in self._shards:
            if shard.data is None:  # a call for each takes time
                shard.init_data("cpu")

    def regions(self, files: Sequence[str], numbers: torch.Tensor) -> list[Region]:
        """Return the regions to read; shards without data get CPU memory."""
        self._allocate()
        return self._list_regions(self._found, files, numbers)

    def _list_regions(self, found: Overlaps, files: Sequence[str], numbers: torch.Tensor) -> list[Region]:
        """Return regions as objects; their shards have memory."""
        stored = self._chunks.box.rows(found.stored)
        chunks = self._chunks.list(found.stored, stored, files)
        columns = (
            found.wanted.tolist(),
            self._requested.offset[found.wanted].tolist(),
            numbers[stored.spec].tolist(),
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


def _match_few(
    shards: Sequence[ShardedTensor], specs: Sequence[int], chunks: Chunks, bounds: torch.Tensor, files: Sequence[str]
) -> _FewShards | None:
    """Match shards that are boxes of stored tensors of the same global shape, if they are few.

    None if they are many, or one is not a part of one chunk that shares no element with another. ``specs`` is the place
    of each one's tensor among the requested ones.
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
    return _FewShards(shards, specs, parts)


def _find_simple(shards: Sequence[ShardedTensor], stored: Sequence[Ints]) -> list[bool]:
    """Return whether each shard can be filled region by region, and has the stored global shape."""
    shapes, flat, loose, tensors = list_fields(
        shards, "global_shape", "flattened_range", "allow_shape_mismatch", "data"
    )
    if not {*map(type, tensors)} - {*ORDINARY, type(None)} and not any(loose) and flat.count(None) == len(flat):
        return [True] * len(shards)  # most loads are so; shapes that must be equal are
    return [
        part is None and not is_loose and not is_quantized(data) and shape == tuple(wanted)
        for shape, wanted, part, is_loose, data in zip(stored, shapes, flat, loose, tensors, strict=True)
    ]


def _view_unflattened(shard: ShardedTensor) -> torch.Tensor:
    """Return the memory of a shard that is one box, in the shape of the box."""
    if shard.data is None or shard.prepend_axis_num:
        return part_view(shard, FlatPart(unflattened_box(shard), 0))
    return shard.data.detach()


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
