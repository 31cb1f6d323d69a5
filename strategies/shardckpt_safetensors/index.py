"""The index: the places of boxes of tensors, and of objects. FORMAT.md specifies it."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.chunks import ChunkIndex, Chunks, Item
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    KeyMismatchError,
    VersionTooNewError,
    listed,
)
from shardckpt.manifest import RECORD_NAME
from shardckpt.mapping import BlockScales, ShardedObject
from shardckpt.planning import Table, are_full, find_untiled, list_rows, make_bounds, make_column, number_groups
from shardckpt.storage import LENGTH_BYTES, Columns, ParseCache, check_file_name, header_length
from shardckpt.strategy import StoredColumns, find_error
from shardckpt_safetensors.index_columns import (
    SIZE_LIMIT,
    are_below_limit,
    check_column,
    find_limits,
    multiply_sizes,
    read_column,
    read_tensors,
    read_unchecked,
)
from shardckpt_safetensors.index_header import parse_header
from shardckpt_safetensors.index_names import BLOCK_SCALES, COMMON_FILE, FEATURE, HEADER, INDEX_FILE, UNALIGNED
from shardckpt_safetensors.index_parts import ALIGN, HEADER_LIMIT, IndexParts
from shardckpt_safetensors.names import Strings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointReader

logger = logging.getLogger(__name__)

_SUFFIX = ".safetensors"
#: Tensors and boxes of a selection that is kept for the next load of the same tensors.
_FEW_SELECTED = 1024


class StoredObject(NamedTuple):
    """An object: its codec, and where it lies."""

    codec: str
    item: Item


@dataclass(frozen=True)
class _Columns:
    """The columns of boxes in their stored dtypes."""

    offset: torch.Tensor
    extent: torch.Tensor
    file: torch.Tensor
    start: torch.Tensor

    def take(self, which: torch.Tensor | slice) -> tuple[torch.Tensor, ...]:
        """Return offset, extent, file and start of some rows as int64."""
        return tuple(column[which].long() for column in (self.offset, self.extent, self.file, self.start))


class StoredIndex(ChunkIndex):
    """The index of a checkpoint; ``header`` is its JSON.

    Names, dtypes and shapes are decoded, and boxes checked, when they are requested.
    """

    def __init__(
        self, columns: Columns, source: str, sizes: Mapping[str, int], reader: CheckpointReader | None = None
    ) -> None:
        self._source = source
        self.header = parse_header(columns.metadata.get(HEADER))
        self._sizes = sizes
        self._align = 1 if UNALIGNED in self.header.required_features else ALIGN
        strings = Strings(columns.raw("text"), read_column(columns, "text_end", (-1,)).long())
        self.files = strings.get(read_column(columns, "file", (-1,), len(strings)).tolist())
        for name in self.files:
            _check_data_name(name)
        tensors = read_tensors(columns, strings, self.header.dtypes)
        self._boxes: _Columns | IndexParts
        if FEATURE in self.header.required_features:
            check_column(not tensors.keys, "tensor", "has rows, and the index is in parts")
            if reader is None:
                raise CorruptCheckpointError("it is in parts, which are in other files")
            parts = _list_parts(columns, strings)
            check_column(not {name for name, _ in parts} & {*self.files}, "part", "has a data file")
            self._boxes = IndexParts(parts, reader, self._align)
            tensors = self._boxes.tensors
        else:
            shape = int(tensors.bounds[-1]), tensors.extents.shape[1]
            self._boxes = _Columns(
                # a million values: those that are requested are checked then
                *(read_unchecked(columns, name, shape) for name in ("box_offset", "box_extent")),
                *(read_unchecked(columns, name, shape[:1]) for name in ("box_file", "box_start")),
            )
        keys, dtypes, shapes, axes, self._extents, self.bounds = tensors
        self._lists = keys, dtypes, shapes
        self._count = len(keys)
        self._axes = axes
        count = self._count
        self._alias = read_column(columns, "alias", (-1, 2), len(strings))
        self._alias_tensor = read_column(columns, "alias_tensor", (len(self._alias),), count)
        self._object = read_column(columns, "object", (-1, 2), len(strings))
        self._object_places = [
            read_column(columns, f"object_{name}", (len(self._object),), most).long()
            for name, most in (
                ("codec", len(self.header.codecs)),
                ("file", len(self.files)),
                ("start", None),
                ("nbytes", None),
            )
        ]
        self._strings = strings
        #: The last selection: tensors, their checked chunks, and bounds. The next is often of the same tensors.
        self._selected: tuple[torch.Tensor, Chunks, torch.Tensor] | None = None
        self._scaled: list[torch.Tensor] = []
        if BLOCK_SCALES in self.header.optional_features:
            scaled = read_column(columns, "scaled", (-1,), count)
            by = read_column(columns, "scaled_by", (len(scaled),), count)
            self._scaled = [scaled, by, read_column(columns, "scaled_block", (len(scaled), self._extents.shape[1]))]

    @cached_property
    def keys(self) -> list[str]:  # type: ignore[override]
        """The keys of the tensors, decoded when they are first requested, as dtypes and shapes are."""
        return [*self._lists[0]]

    @cached_property
    def dtypes(self) -> list[torch.dtype]:  # type: ignore[override]
        """Their dtypes."""
        return [*self._lists[1]]

    @cached_property
    def shapes(self) -> list[Ints]:  # type: ignore[override]
        """Their global shapes."""
        return [*self._lists[2]]

    @cached_property
    def scales(self) -> dict[int, tuple[int, Ints]]:
        """By the number of a block-scaled tensor, that of its scales, and a block's size along each axis."""
        rows = zip(*(column.tolist() for column in self._scaled), strict=True)
        found = {number: (by, tuple(block[: len(self.shapes[number])])) for number, by, block in rows}
        if len(found) < (len(self._scaled[0]) if self._scaled else 0) or any(0 in block for _, block in found.values()):
            raise CorruptCheckpointError(f"{self._source}: it has scales of a tensor twice, or blocks of no elements")
        return found

    @cached_property
    def aliases(self) -> dict[str, int]:
        """The number of a tensor by each of its further names."""
        return dict(zip(self._strings.names("alias", self._alias), self._alias_tensor.tolist(), strict=True))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each tensor, by all of its names."""
        found = {key: number for number, key in enumerate(self.keys)}
        aliases, objects = self.aliases, self.objects
        names = self._count + len(self._alias) + len(self._object)
        if len({*found, *aliases, *objects}) < names:
            counts = Counter([*self.keys, *aliases, *objects])
            twice = [repr(name) for name, number in counts.items() if number > 1] or ["an alias"]
            raise CorruptCheckpointError(f"{self._source}: it has {listed(twice)} more than once")
        return {**found, **aliases}

    @cached_property
    def objects(self) -> dict[str, StoredObject]:
        """The objects by name."""
        names = self._strings.names("object", self._object)
        codec, file, start, nbytes = self._object_places
        rows = zip(codec.tolist(), file.tolist(), start.tolist(), nbytes.tolist(), strict=True)
        return {
            name: StoredObject(self.header.codecs[codec], Item(self.files[file], start, nbytes))
            for name, (codec, file, start, nbytes) in zip(names, rows, strict=True)
        }

    @property
    def parts(self) -> list[str]:
        """The names of the files that have parts of the index; none if it is one file."""
        return self._boxes.names if isinstance(self._boxes, IndexParts) else []

    def find_parts(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the place in ``parts`` of the file that has each tensor; -1 if the index is one file."""
        return self._boxes.find_parts(numbers) if isinstance(self._boxes, IndexParts) else torch.full_like(numbers, -1)

    def select_chunks(
        self, numbers: torch.Tensor, wanted: Callable[[], Table] | None = None
    ) -> tuple[Chunks, torch.Tensor]:
        """Return the chunks of some tensors, after a check of their entries in the index; see the base.

        Of an index in parts only the pages are read that may have boxes with elements of the wanted ones. The index is
        damaged if a box is outside of its tensor, or its payload of its file; if elements are missing or there twice;
        or if payloads overlap.
        """
        kept = self._selected
        if kept is not None and torch.equal(kept[0], numbers):
            return kept[1:]
        chunks, bounds = self._select(numbers, wanted)
        self._check_payloads(chunks, numbers)
        if isinstance(self._boxes, _Columns) and max(len(numbers), len(chunks.file)) <= _FEW_SELECTED:
            self._selected = numbers, chunks, bounds
        return chunks, bounds

    def _select(self, numbers: torch.Tensor, wanted: Callable[[], Table] | None = None) -> tuple[Chunks, torch.Tensor]:
        """Return the chunks of some tensors, after a check of their boxes."""
        has_all_boxes = wanted is None or isinstance(self._boxes, _Columns)
        rows, bounds = self._find_rows(numbers, wanted)
        spec = number_groups(bounds[1:])
        offset, extent, file, start = self._boxes.take(rows)
        table = Table(spec, offset, extent)
        itemsizes = make_column([self.dtypes[number].itemsize for number in numbers.tolist()])
        sizes = torch.cat([self._extents[numbers].long(), itemsizes.view(-1, 1)], 1)
        if not are_below_limit(sizes):
            too_many = multiply_sizes(sizes) >= SIZE_LIMIT
            self._refuse(too_many, lambda: numbers, "has a shape of too many bytes")
        volume = self._check_boxes(table, numbers, has_all_boxes=has_all_boxes)
        chunks = Chunks(
            table,
            file,
            start,
            volume * itemsizes[spec],
            torch.zeros(1, dtype=torch.int64, device="cpu").expand(len(spec)),
            volume,
        )
        low, high = find_limits(chunks.file)
        if low < 0 or high >= len(self.files):
            unknown = (chunks.file < 0) | (chunks.file >= len(self.files))
            self._refuse(unknown, lambda: numbers[spec], "has a payload in a file that the index does not name")
        return chunks, bounds

    def _find_rows(
        self, numbers: torch.Tensor, wanted: Callable[[], Table] | None
    ) -> tuple[torch.Tensor | slice, torch.Tensor]:
        """Return the rows of the boxes of some tensors, and the bounds of each tensor's among them.

        Of an index in parts only those that may have elements of the wanted boxes, if these are given.
        """
        boxes = self._boxes
        if wanted is not None and isinstance(boxes, IndexParts):
            rows = boxes.find_rows(numbers, wanted())
            owners = torch.searchsorted(self.bounds[1:], rows, right=True)
            counts = torch.bincount(torch.searchsorted(numbers, owners), minlength=len(numbers))
        elif len(numbers) == self._count:
            return slice(0, int(self.bounds[-1])), self.bounds
        else:
            rows = list_rows(numbers, self.bounds)
            counts = self.bounds[numbers + 1] - self.bounds[numbers]
        # shards of one tensor are most: a slice is cheaper than indices
        is_run = len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1
        return slice(int(rows[0]), int(rows[-1]) + 1) if is_run else rows, make_bounds(counts)

    def find_object(self, name: str) -> StoredObject:
        """Return an object, after a check of where it lies; it is damaged if its payload is outside of its file."""
        if name not in self.objects:
            raise KeyMismatchError(f"not in the checkpoint: {name}")
        found = self.objects[name]
        file, start, nbytes = found.item
        if start % self._align or start < LENGTH_BYTES or nbytes > self._size_of(file) - start:
            self._fail(name, f"has its payload outside of {file}, or not at a multiple of {self._align} bytes")
        return found

    def check(self) -> None:
        """Check everything that the index says, of itself and of the files."""
        self._check_payloads(self._every_chunk, torch.arange(self._count, device="cpu"))
        if isinstance(self._boxes, IndexParts):
            self._boxes.check(self._every_chunk.box)
        for name in self.objects:
            self.find_object(name)
        _ = self.numbers  # raises if a name is there twice
        order, shared = _find_shared(*self._places)
        if bool(shared.any()):
            self._fail(self._key_of(int(order[1:][shared][0])), "has a payload that shares bytes with another")

    def ignoring_sizes(self, files: Collection[str]) -> StoredIndex:
        """Return the index with room for all its payloads in some files: to check it where these are damaged."""
        found = copy.copy(self)
        found.__dict__.pop("_file_sizes", None)
        found._sizes = {**self._sizes, **dict.fromkeys(files, int(SIZE_LIMIT))}  # noqa: SLF001 - of this class
        return found

    def find_outside(self, name: str, first: int, size: int) -> tuple[str, int] | None:
        """Return the key and the start of a payload of a file that is not in its bytes from ``first`` to ``size``."""
        number = self.files.index(name)
        low, high = self._reach
        if low[number] >= first and high[number] <= size:
            return None
        file, start, length = self._places
        row = int(((file == number) & ((start < first) | (start + length > size))).nonzero()[0])
        return self._key_of(row), int(start[row])

    @cached_property
    def _every_chunk(self) -> Chunks:
        return self._select(torch.arange(self._count, device="cpu"))[0]

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """File, start and length of all payloads: of the boxes, then of the objects."""
        chunks, (_, *objects) = self._every_chunk, self._object_places
        file, start, length = map(torch.cat, zip((chunks.file, chunks.start, chunks.length), objects, strict=True))
        return file, start, length

    @cached_property
    def _reach(self) -> tuple[list[int], list[int]]:
        """The begin of the first payload of each file, and the end of the last."""
        file, start, length = self._places
        low = torch.full((len(self.files),), torch.iinfo(torch.int64).max, device="cpu")
        low.scatter_reduce_(0, file, start, "amin")
        high = torch.zeros(len(self.files), dtype=torch.int64, device="cpu")
        return low.tolist(), high.scatter_reduce_(0, file, start + length, "amax").tolist()

    def _key_of(self, row: int) -> str:
        """Return the key of a row of the places."""
        spec = self._every_chunk.box.spec
        return self.keys[int(spec[row])] if row < len(spec) else list(self.objects)[row - len(spec)]

    def list_items(self) -> list[tuple[str, Item]]:
        """Return all payloads with each of their names, in the order of the files; these are not looked at."""
        chunks = self._every_chunk
        names: dict[int, list[str]] = {}
        for name, number in self.numbers.items():
            names.setdefault(number, []).append(name)
        rows = zip(
            chunks.box.spec.tolist(), chunks.file.tolist(), chunks.start.tolist(), chunks.length.tolist(), strict=True
        )
        found = [
            (name, Item(self.files[file], start, length)) for spec, file, start, length in rows for name in names[spec]
        ]
        found += [(name, stored.item) for name, stored in self.objects.items()]
        return sorted(found, key=lambda pair: pair[1])

    def columns(self) -> StoredColumns:
        """Return each name of a tensor, with its dtype, its shape and its scales, and the keys of ShardedObjects."""
        keys, dtypes, shapes = [*self.numbers], self.dtypes, self.shapes
        numbers = [*self.numbers.values()]
        if len(numbers) > len(dtypes):  # aliases are names of tensors that are there already
            dtypes, shapes = [dtypes[number] for number in numbers], [shapes[number] for number in numbers]
        scales = {
            name: BlockScales(self.keys[self.scales[number][0]], self.scales[number][1])
            for name, number in (self.numbers.items() if self.scales else ())
            if number in self.scales
        }
        objects = [shard.unique_key for shard in map(_describe_object, self.objects) if shard is not None]
        return StoredColumns(keys, dtypes, shapes, objects, scales)

    @property
    def plain_objects(self) -> list[str]:
        """The names of objects that are not those of ShardedObjects, and so are not among :meth:`columns`."""
        return [name for name in self.objects if _describe_object(name) is None]

    def _check_boxes(self, table: Table, numbers: torch.Tensor, *, has_all_boxes: bool) -> torch.Tensor:
        """Check that boxes are inside of their tensors and sorted, and, if these are all, that they fill them.

        Return their volumes.
        """
        extents = self._extents[numbers].long()
        if are_full(table, extents):  # most tensors have one box
            return table.volume()
        # axes that a tensor with fewer than the others lacks: a box has extent 1 along them
        lacked = torch.arange(extents.shape[1], device="cpu") >= self._axes[numbers].view(-1, 1)
        spec, owners = table.spec, numbers[table.spec]
        inside = (table.offset >= 0) & (table.offset <= extents[spec] - table.extent) & (table.extent >= lacked[spec])
        inside = inside.all(1)
        self._refuse(~inside, lambda: owners, "has a box outside of its shape")
        volume = table.volume()
        if has_all_boxes:
            totals = torch.zeros(len(numbers), dtype=torch.int64, device="cpu").index_add_(0, spec, volume)
            shapes = [self.shapes[number] for number in numbers.tolist()]
            wrong_count = totals != extents.prod(1)
            self._refuse(wrong_count, lambda: numbers, "has boxes that do not have each of its elements once")
            wrong = find_untiled(table, shapes)
            if wrong:
                self._fail(self.keys[int(numbers[wrong[0]])], "has boxes that do not have each of its elements once")
        steps = table.offset[1:] - table.offset[:-1]
        if steps.shape[1]:
            first = (steps != 0).to(torch.uint8).argmax(1, keepdim=True)  # the axis that decides the order
            back = (steps.gather(1, first).view(-1) < 0) & (spec[1:] == spec[:-1])
            self._refuse(back, lambda: owners[1:], "has boxes that are not sorted by their offsets")
        return volume

    def _check_payloads(self, chunks: Chunks, numbers: torch.Tensor) -> None:
        """Check that payloads lie in their files, aligned and behind a header, and share no bytes."""
        spec, start, length = chunks.box.spec, chunks.start, chunks.length
        sizes = self._sizes_of(chunks.file)
        bad = (start % self._align != 0) | (start < LENGTH_BYTES) | (length > sizes - start)
        fault = f"has a payload outside of its file, or not at a multiple of {self._align} bytes"
        self._refuse(bad, lambda: numbers[spec], fault)
        order, shared = _find_shared(chunks.file, start, length)
        self._refuse(shared, lambda: numbers[spec[order]][1:], "has a payload that shares bytes with another")

    def _sizes_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the size in bytes of the file with each number."""
        found = self._file_sizes[numbers]
        if bool((found < 0).any()):
            self._size_of(self.files[int(numbers[found < 0][0])])
        return found

    @cached_property
    def _file_sizes(self) -> torch.Tensor:
        """The size of each file in bytes; -1 for one that the checkpoint does not have."""
        return make_column([self._sizes.get(name, -1) for name in self.files])

    def _size_of(self, name: str) -> int:
        if name not in self._sizes:
            raise CorruptCheckpointError(f"{self._source}: it names {name}, which is not a file of this checkpoint")
        return self._sizes[name]

    def _refuse(self, bad: torch.Tensor, find_numbers: Callable[[], torch.Tensor], fault: str) -> None:
        """Raise CorruptCheckpointError with the key of the first row that is bad.

        ``find_numbers`` returns the number of each row's tensor; it is called if one is bad.
        """
        if bool(bad.any()):
            self._fail(self.keys[int(find_numbers()[bad][0])], fault)

    def _fail(self, key: str, fault: str) -> None:
        raise CorruptCheckpointError(f"{self._source}: {key!r:.300} {fault}")


#: The indexes of small checkpoints.
_indexes = ParseCache[StoredIndex]()


def read_index(reader: CheckpointReader) -> StoredIndex:
    """Return the index of a checkpoint, which callers share and must not change.

    It is read once per reader. That of a small checkpoint is not parsed again for a later reader of the same bytes.
    """
    return reader.parsed(INDEX_FILE, lambda: _read_index(reader))


def find_part_errors(reader: CheckpointReader) -> dict[str, CheckpointingException | None]:
    """Return the error of each part of the index that is in a file of its own, or None, by file name.

    If the index itself is damaged, that is raised.
    """
    source = f"{reader.directory / INDEX_FILE}"
    columns = Columns(_read_bytes(reader, source), source)
    if FEATURE not in parse_header(columns.metadata.get(HEADER)).required_features:
        return {}
    strings = Strings(columns.raw("text"), read_column(columns, "text_end", (-1,)).long())
    return {name: find_error(IndexParts, [(name, head)], reader, ALIGN) for name, head in _list_parts(columns, strings)}


def _list_parts(columns: Columns, strings: Strings) -> list[tuple[str, int]]:
    """Return the files that have parts of the index, and the bytes of each before its rows."""
    names = strings.get(read_column(columns, "part", (-1,), len(strings)).tolist())
    for name in names:
        _check_data_name(name)
    check_column(len({*names}) == len(names), "part", "has a file twice")
    return list(zip(names, read_column(columns, "part_head", (len(names),)).tolist(), strict=True))


def _read_bytes(reader: CheckpointReader, source: str) -> bytearray:
    size = reader.size(INDEX_FILE)
    if size > LENGTH_BYTES + HEADER_LIMIT:  # in a smaller file no header is longer
        header_length(reader.read_range(INDEX_FILE, 0, LENGTH_BYTES, "the index"), size, source, HEADER_LIMIT)
    data = bytearray(size)
    reader.read_into(INDEX_FILE, 0, memoryview(data), "the index")
    return data


def _read_index(reader: CheckpointReader) -> StoredIndex:
    source = f"{reader.directory / INDEX_FILE}"
    data = _read_bytes(reader, source)
    parse = partial(_parse_index, data, source, reader)
    record = reader.manifest.record
    if record is None:
        state = "damaged" if reader.has(RECORD_NAME) else "missing"
        logger.warning("%s: %s is %s: no digest is checked", reader.directory, RECORD_NAME, state)
        return parse()
    # one in parts reads further files later, by the reader
    return _indexes.get(data, (source, record.self_digest), parse, lambda index: not index.parts)


def _parse_index(data: bytearray, source: str, reader: CheckpointReader) -> StoredIndex:
    columns = Columns(data, source)
    record = reader.manifest.record
    sizes = {} if record is None else {file.name: file.size for file in record.files}
    try:
        index = StoredIndex(columns, source, sizes, reader)
    except (CorruptCheckpointError, VersionTooNewError) as exc:
        raise exc if str(exc).startswith(source) else type(exc)(f"{source}: {exc}") from exc
    if record is not None and index.header.id != record.save_id:
        raise CorruptCheckpointError(f"{source} is of save {index.header.id}, the checkpoint of {record.save_id}")
    for name in index.files if record is None else ():
        with suppress(CheckpointingException):  # a load that needs the file refuses it
            sizes[name] = reader.size(name)
    return index


def _check_data_name(name: str) -> None:
    """Raise CorruptCheckpointError if no data file has such a name."""
    check_file_name(name)
    if not name.endswith(_SUFFIX) or name in (INDEX_FILE, COMMON_FILE):
        raise CorruptCheckpointError(f"it names {name!r:.300}, which is no data file")


def _find_shared(file: torch.Tensor, start: torch.Tensor, length: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of payloads in their files, and of each but the first whether it begins before the last ends.

    An empty one comes before another at the same place.
    """
    order = torch.arange(len(file), device="cpu")
    shared = _share_bytes(file, start, length)
    if bool(((file[1:] < file[:-1]) | shared).any()):  # most are written in this order
        order = length.argsort(stable=True)
        for column in (start, file):
            order = order[column[order].argsort(stable=True)]
        shared = _share_bytes(file[order], start[order], length[order])
    return order, shared


def _share_bytes(file: torch.Tensor, start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    return (file[1:] == file[:-1]) & (start[:-1] + length[:-1] > start[1:])


def _describe_object(name: str) -> ShardedObject | None:
    """Return the description of an object; None if its name is not that of one of a grid, which loads ask for."""
    try:
        return ShardedObject.empty_from_unique_key(name)
    except CheckpointingException:
        return None
