"""The index: which boxes of which tensors, and which objects, lie where. FORMAT.md specifies it."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shardckpt import __version__
from shardckpt.chunks import ChunkIndex, Chunks, Item
from shardckpt.errors import (
    CheckpointingException,
    CorruptCheckpointError,
    KeyMismatchError,
    VersionTooNewError,
    listed,
)
from shardckpt.mapping import PlainObject, ShardedObject, ShardedTensor
from shardckpt.planning import Table, find_untiled, list_rows, make_column, make_matrix, number_groups
from shardckpt.storage import LENGTH_BYTES, Columns, check_file_name, header_length, pack_columns, parse_json
from shardckpt_safetensors.dtypes import dtype_name, parse_dtype
from shardckpt_safetensors.names import Lazy, Strings, StringTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shardckpt.chunks import MergedPlan
    from shardckpt.mapping import ShardedBase
    from shardckpt.planning import Ints
    from shardckpt.storage import CheckpointReader

INDEX_FILE = "index.safetensors"
COMMON_FILE = "common.safetensors"
#: Payloads begin at multiples of it, in bytes.
ALIGN = 64
#: The codecs of objects, by their number in a plan.
CODECS = ("json", "safetensors", "raw")

_SUFFIX = ".safetensors"
_HEADER = "shardckpt"
_FORMAT = "1.0"
_MAJOR = 1
#: Features that this release reads.
_KNOWN_FEATURES: frozenset[str] = frozenset()
_MOST_AXES = 64
#: Longest header, in bytes.
_HEADER_LIMIT = 1 << 22
#: What the bytes of a tensor, sizes of 0 left out, must be below. Floats compute products up to here exactly.
_COUNTABLE = 2.0**53


class IndexHeader(BaseModel):
    """The JSON of the index; with extensions, which a removal of keys keeps."""

    model_config = ConfigDict(strict=True, extra="allow")

    format: Annotated[str, Field(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$")]
    required_features: list[str]
    optional_features: list[str]
    id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    parent: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None
    step: Annotated[int, Field(ge=0)] | None
    created_by: str
    dtypes: list[str]
    codecs: list[str]


class StoredObject(NamedTuple):
    """An object: its codec, and where it lies."""

    codec: str
    item: Item


def make_header(save_id: str) -> IndexHeader:
    """Return the JSON of a new index, still without dtypes and codecs."""
    return IndexHeader(
        format=_FORMAT,
        required_features=[],
        optional_features=[],
        id=save_id,
        parent=None,
        step=None,
        created_by=f"shardckpt {__version__}",
        dtypes=[],
        codecs=[],
    )


def encode_index(plan: MergedPlan, header: IndexHeader, aliases: Mapping[str, int] | None = None) -> bytes:
    """Encode what all ranks store as the bytes of the index.

    Args:
        plan: The merged plan. The location of a box is file and start, that of an object file, start, size and codec.
        header: What the index says of itself; its dtypes and codecs are replaced by those of the plan.
        aliases: The number of a tensor by each of its further names.
    """
    aliases = aliases or {}
    strings = StringTable()
    axes = [len(shape) for shape in plan.shapes]
    width = max(axes, default=0)
    names = list(map(dtype_name, plan.keys, plan.dtypes))
    dtypes = {name: number for number, name in enumerate(dict.fromkeys(names))}
    objects = make_matrix([tuple(row) for row in plan.objects.values()], 4, 0)
    codecs = sorted(set(objects[:, 3].tolist()))
    box = plan.boxes.pad_axes(width)
    order = _sort_rows(box.spec, box.offset)
    columns = {
        "file": make_column([strings.add(name) for name in plan.files]),
        "tensor": strings.add_names(plan.keys),
        "tensor_dtype": make_column([dtypes[name] for name in names]),
        "tensor_axes": make_column(axes),
        "tensor_shape": make_matrix(plan.shapes, width, 1),
        "tensor_end": plan.bounds[1:],
        "box_offset": box.offset[order, :width],
        "box_extent": box.extent[order, :width],
        "box_file": plan.locations[order, 0],
        "box_start": plan.locations[order, 1],
        "alias": strings.add_names(aliases),
        "alias_tensor": make_column([*aliases.values()]),
        "object": strings.add_names(plan.objects),
        "object_codec": torch.searchsorted(make_column(codecs), objects[:, 3].contiguous()),
        "object_file": objects[:, 0],
        "object_start": objects[:, 1],
        "object_nbytes": objects[:, 2],
    }
    used = {"dtypes": list(dtypes), "codecs": [CODECS[number] for number in codecs]}
    return pack_columns({**strings.columns(), **columns}, {_HEADER: header.model_copy(update=used).model_dump_json()})


def _sort_rows(spec: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """Return the order of rows by tensor, and by offset within a tensor."""
    order = torch.arange(len(spec), device="cpu")
    for column in (*reversed(offset.unbind(1)), spec):
        order = order[column[order].argsort(stable=True)]
    return order


@dataclass(frozen=True)
class _Columns:
    """The columns of boxes in their stored dtypes."""

    offset: torch.Tensor
    extent: torch.Tensor
    file: torch.Tensor
    start: torch.Tensor


class StoredIndex(ChunkIndex):
    """The index of a checkpoint. Names, dtypes and shapes are decoded, and boxes checked, when they are requested.

    Args:
        columns: The columns.
        source: Its path, for errors.
        sizes: Bytes of the checkpoint's files, by name.

    Attributes:
        header: Its JSON.

    Raises:
        CorruptCheckpointError: It contradicts itself.
        VersionTooNewError: It needs a newer release.
    """

    def __init__(self, columns: Columns, source: str, sizes: Mapping[str, int]) -> None:
        self._source = source
        self.header = _parse_header(columns.metadata.get(_HEADER))
        self._sizes = sizes
        strings = Strings(columns.raw("text"), _read(columns, "text_end", (-1,)).long())
        self.files = strings.get(_read(columns, "file", (-1,), len(strings)).long())
        for name in self.files:
            _check_data_name(name)
        pairs = _read(columns, "tensor", (-1, 2), len(strings))
        count = len(pairs)
        self.keys = Lazy(count, lambda: strings.names("tensor", pairs))
        codes = _read(columns, "tensor_dtype", (count,), len(self.header.dtypes))
        self.dtypes = Lazy(count, lambda: _parse_dtypes(self.header.dtypes, codes))
        axes = _read(columns, "tensor_axes", (count,), _MOST_AXES + 1)
        width = int(axes.max()) if count else 0
        self._extents = _read(columns, "tensor_shape", (count, width))
        self._lacked = torch.arange(width, device="cpu") >= axes.view(-1, 1)
        _require(bool((~self._lacked | (self._extents == 1)).all()), "tensor_shape", "has a size of an axis too many")
        _require(bool((_count(self._extents) < _COUNTABLE).all()), "tensor_shape", "has too many elements")
        self.shapes = Lazy(count, lambda: _trim(self._extents, axes))
        ends = _read(columns, "tensor_end", (count,)).long()
        self.bounds = torch.cat([ends.new_zeros(1), ends])
        _require(bool((self.bounds[:-1] <= self.bounds[1:]).all()), "tensor_end", "does not ascend")
        boxes = int(self.bounds[-1])
        self._boxes = _Columns(
            # a million values: those that are requested are checked then
            *(_read_unchecked(columns, name, (boxes, width)) for name in ("box_offset", "box_extent")),
            *(_read_unchecked(columns, name, (boxes,)) for name in ("box_file", "box_start")),
        )
        self._alias = _read(columns, "alias", (-1, 2), len(strings))
        self._alias_tensor = _read(columns, "alias_tensor", (len(self._alias),), count)
        self._object = _read(columns, "object", (-1, 2), len(strings))
        self._object_places = [
            _read(columns, f"object_{name}", (len(self._object),), most).long()
            for name, most in (
                ("codec", len(self.header.codecs)),
                ("file", len(self.files)),
                ("start", None),
                ("nbytes", None),
            )
        ]
        self._strings = strings

    @cached_property
    def aliases(self) -> dict[str, int]:
        """The number of a tensor by each of its further names."""
        return dict(zip(self._strings.names("alias", self._alias), self._alias_tensor.tolist(), strict=True))

    @cached_property
    def numbers(self) -> Mapping[str, int]:
        """The number of each tensor, by all of its names."""
        found = {key: number for number, key in enumerate(self.keys)}
        aliases, objects = self.aliases, self.objects
        names = len(self.keys) + len(self._alias) + len(self._object)
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

    def take_chunks(self, numbers: torch.Tensor) -> tuple[Chunks, torch.Tensor]:
        """Return the chunks of some tensors, after a check of what the index says of them; see the base.

        Raises:
            CorruptCheckpointError: A box is outside of its tensor, or its payload of its file; elements are missing or
                there twice; or payloads overlap.
        """
        chunks, bounds = self._select(numbers)
        self._check_payloads(chunks, numbers)
        return chunks, bounds

    def _select(self, numbers: torch.Tensor) -> tuple[Chunks, torch.Tensor]:
        """Return the chunks of some tensors, after a check of their boxes."""
        rows = list_rows(numbers, self.bounds)
        counts = self.bounds[numbers + 1] - self.bounds[numbers]
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        spec = number_groups(bounds[1:])
        # shards of one tensor are most: a slice is cheaper than indices
        which = (
            slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) and int(rows[-1] - rows[0]) == len(rows) - 1 else rows
        )
        boxes = self._boxes
        table = Table(spec, boxes.offset[which].long(), boxes.extent[which].long())
        itemsizes = make_column([self.dtypes[number].itemsize for number in numbers.tolist()])
        many = _count(self._extents[numbers]) * itemsizes >= _COUNTABLE
        self._refuse(many, numbers, "has a shape of too many bytes")
        volume = self._check_boxes(table, numbers)
        chunks = Chunks(
            table,
            boxes.file[which].long(),
            boxes.start[which].long(),
            volume * itemsizes[spec],
            torch.zeros(1, dtype=torch.int64, device="cpu").expand(len(rows)),
            volume,
        )
        unknown = (chunks.file < 0) | (chunks.file >= len(self.files))
        self._refuse(unknown, numbers[spec], "has a payload in a file that the index does not name")
        return chunks, bounds

    def take_object(self, name: str) -> StoredObject:
        """Return an object, after a check of where it lies.

        Raises:
            KeyMismatchError: There is none of this name.
            CorruptCheckpointError: Its payload is outside of its file.
        """
        if name not in self.objects:
            raise KeyMismatchError(f"not in the checkpoint: {name}")
        found = self.objects[name]
        file, start, nbytes = found.item
        if start % ALIGN or start < ALIGN or nbytes > self._size_of(file) - start:
            self._fail(name, f"has its payload outside of {file}, or not at a multiple of {ALIGN} bytes")
        return found

    def check(self) -> None:
        """Check everything that the index says.

        Raises:
            CorruptCheckpointError: It contradicts itself, or the files.
        """
        self._check_payloads(self._every_chunk, torch.arange(len(self.keys), device="cpu"))
        for name in self.objects:
            self.take_object(name)
        _ = self.numbers
        file, start, length = self._places
        order = _sort_places(file, start, length)
        file, start, length = file[order], start[order], length[order]
        common = (file[1:] == file[:-1]) & (start[:-1] + length[:-1] > start[1:])
        if bool(common.any()):
            self._fail(self._key_of(int(order[1:][common][0])), "has a payload that shares bytes with another")

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
        return self._select(torch.arange(len(self.keys), device="cpu"))[0]

    @cached_property
    def _places(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """File, start and length of all payloads: of the boxes, then of the objects."""
        chunks, (_, *objects) = self._every_chunk, self._object_places
        file, start, length = map(torch.cat, zip((chunks.file, chunks.start, chunks.length), objects, strict=True))
        return file, start, length

    @cached_property
    def _reach(self) -> tuple[list[int], list[int]]:
        """Where the first payload of each file begins, and the last one ends."""
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
        """Return all payloads with their keys, in the order of the files; these are not looked at."""
        chunks = self._every_chunk
        rows = zip(
            chunks.box.spec.tolist(), chunks.file.tolist(), chunks.start.tolist(), chunks.length.tolist(), strict=True
        )
        found = [(self.keys[spec], Item(self.files[file], start, length)) for spec, file, start, length in rows]
        found += [(name, stored.item) for name, stored in self.objects.items()]
        return sorted(found, key=lambda pair: pair[1])

    def shards(self) -> list[ShardedBase]:
        """Return a ShardedTensor for each name of a tensor, without data, and a ShardedObject for each object."""
        tensors: list[ShardedBase] = [
            ShardedTensor.from_global_shape(name, self.dtypes[number], self.shapes[number])
            for name, number in self.numbers.items()
        ]
        return tensors + [shard for shard in map(_describe_object, self.objects) if shard is not None]

    def _check_boxes(self, table: Table, numbers: torch.Tensor) -> torch.Tensor:
        """Check that boxes fill their tensors, and are in order; return their volumes."""
        spec, owners = table.spec, numbers[table.spec]
        extents, lacked = self._extents[numbers].long(), self._lacked[numbers]
        inside = (table.offset >= 0) & (table.offset <= extents[spec] - table.extent) & (table.extent >= lacked[spec])
        inside = inside.all(1)
        self._refuse(~inside, owners, "has a box outside of its shape")
        volume = table.volume()
        totals = torch.zeros(len(numbers), dtype=torch.int64, device="cpu").index_add_(0, spec, volume)
        shapes = [self.shapes[number] for number in numbers.tolist()]
        self._refuse(totals != extents.prod(1), numbers, "has boxes that do not have each of its elements once")
        wrong = find_untiled(table, shapes)
        if wrong:
            self._fail(self.keys[int(numbers[wrong[0]])], "has boxes that do not have each of its elements once")
        steps = table.offset[1:] - table.offset[:-1]
        moved = steps != 0
        first = moved.to(torch.uint8).argmax(1, keepdim=True) if steps.shape[1] else moved.long()
        back = steps.gather(1, first).view(-1) < 0 if steps.shape[1] else torch.zeros(len(steps), dtype=torch.bool)
        self._refuse(back & (spec[1:] == spec[:-1]), owners[1:], "has boxes that are not sorted by their offsets")
        return volume

    def _check_payloads(self, chunks: Chunks, numbers: torch.Tensor) -> None:
        """Check that payloads lie in their files, aligned and behind a header, and share no bytes."""
        spec, start, length = chunks.box.spec, chunks.start, chunks.length
        sizes = self._sizes_of(chunks.file)
        bad = (start % ALIGN != 0) | (start < ALIGN) | (length > sizes - start)
        self._refuse(bad, numbers[spec], "has a payload outside of its file, or not at a multiple of 64 bytes")
        order = _sort_places(chunks.file, start, length)
        file, start, length = chunks.file[order], start[order], length[order]
        common = (file[1:] == file[:-1]) & (start[:-1] + length[:-1] > start[1:])
        self._refuse(common, numbers[spec[order]][1:], "has a payload that shares bytes with another")

    def _sizes_of(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return the size in bytes of the file with each number."""
        found = torch.zeros(len(self.files), dtype=torch.int64, device="cpu")
        for number in torch.bincount(numbers, minlength=1).nonzero().view(-1).tolist():
            found[number] = self._size_of(self.files[number])
        return found[numbers]

    def _size_of(self, name: str) -> int:
        if name not in self._sizes:
            raise CorruptCheckpointError(f"{self._source}: it names {name}, which is not a file of this checkpoint")
        return self._sizes[name]

    def _refuse(self, bad: torch.Tensor, numbers: torch.Tensor, fault: str) -> None:
        """Raise CorruptCheckpointError with the key of the first row that is bad; each has the number of its tensor."""
        if bool(bad.any()):
            self._fail(self.keys[int(numbers[bad][0])], fault)

    def _fail(self, key: str, fault: str) -> None:
        raise CorruptCheckpointError(f"{self._source}: {key!r:.300} {fault}")


def read_index(reader: CheckpointReader) -> StoredIndex:
    """Return the index of a checkpoint; it is parsed once per reader.

    Raises:
        CorruptCheckpointError: It is damaged.
        VersionTooNewError: It needs a newer release.
    """
    return reader.parsed(INDEX_FILE, lambda: _read_index(reader))


def _read_index(reader: CheckpointReader) -> StoredIndex:
    source = f"{reader.directory / INDEX_FILE}"
    size = reader.size(INDEX_FILE)
    if size > LENGTH_BYTES + _HEADER_LIMIT:  # in a smaller file no header is longer
        header_length(reader.read_range(INDEX_FILE, 0, LENGTH_BYTES, "the index"), size, source, _HEADER_LIMIT)
    data = bytearray(size)
    reader.read_into(INDEX_FILE, 0, memoryview(data), "the index")
    record = reader.manifest.record
    sizes = {} if record is None else {file.name: file.size for file in record.files}
    try:
        index = StoredIndex(Columns(data, source), source, sizes)
    except (CorruptCheckpointError, VersionTooNewError) as exc:
        raise exc if str(exc).startswith(source) else type(exc)(f"{source}: {exc}") from exc
    if record is not None and index.header.id != record.save_id:
        raise CorruptCheckpointError(f"{source} is of save {index.header.id}, the checkpoint of {record.save_id}")
    for name in index.files if record is None else ():
        with suppress(CheckpointingException):  # then what needs the file is refused
            sizes[name] = reader.size(name)
    return index


def _parse_header(text: str | None) -> IndexHeader:
    """Return the JSON of the index, if this release reads it."""
    try:
        found = parse_json((text or "").encode())
        version = found.get("format") if isinstance(found, dict) else None
        if isinstance(version, str) and re.fullmatch(r"[0-9]{1,9}\.[0-9]{1,9}", version):
            major = int(version.partition(".")[0])
            if major > _MAJOR:
                raise VersionTooNewError(
                    f"its format is {version}, this release reads {_MAJOR}.x: install a newer shardckpt"
                )
            if major < _MAJOR:
                raise ValueError(f"its format is {version}, which never was")
        header = IndexHeader.model_validate(found)
    except (ValueError, ValidationError) as exc:
        raise CorruptCheckpointError(f"the JSON in its metadata is damaged: {exc}") from exc
    unknown = sorted(set(header.required_features) - _KNOWN_FEATURES)
    if unknown:
        raise VersionTooNewError(
            f"it needs {listed([repr(name[:100]) for name in unknown])}, which this release does not know: install a "
            f"newer shardckpt (it was written by {header.created_by!r:.100})"
        )
    return header


def _parse_dtypes(names: Sequence[str], codes: torch.Tensor) -> list[torch.dtype]:
    found = codes.tolist()
    known = {code: parse_dtype(names[code]) for code in set(found)}
    return [known[code] for code in found]


def _trim(extents: torch.Tensor, axes: torch.Tensor) -> list[Ints]:
    return [tuple(row[:count]) for row, count in zip(extents.tolist(), axes.tolist(), strict=True)]


def _check_data_name(name: str) -> None:
    """Raise CorruptCheckpointError if no data file has such a name."""
    check_file_name(name)
    if not name.endswith(_SUFFIX) or name in (INDEX_FILE, COMMON_FILE):
        raise CorruptCheckpointError(f"it names {name!r:.300}, which is no data file")


def _read(columns: Columns, name: str, shape: Ints, below: int | None = None) -> torch.Tensor:
    """Return a column in its stored dtype, after a check of its values.

    Args:
        columns: The columns.
        name: Its name.
        shape: The shape that it must have; -1 for any size.
        below: What its values must be below.

    Raises:
        CorruptCheckpointError: It is not there, or has another shape or other values.
    """
    found = _read_unchecked(columns, name, shape)
    low, high = found.aminmax() if found.numel() else (0, -1)
    if int(low) < 0:
        raise CorruptCheckpointError(f"its column {name!r} has {int(low)}")
    if below is not None and int(high) >= below:
        raise CorruptCheckpointError(f"its column {name!r} has {int(high)}, expected less than {below}")
    return found


def _read_unchecked(columns: Columns, name: str, shape: Ints) -> torch.Tensor:
    """Return a column in its stored dtype, whatever its values; the arguments are those of :func:`_read`."""
    found = columns.stored(name)
    if found.dim() != len(shape) or any(
        size not in (-1, actual) for size, actual in zip(shape, found.shape, strict=True)
    ):
        expected = ", ".join("any" if size < 0 else str(size) for size in shape)
        raise CorruptCheckpointError(f"its column {name!r} is of shape {tuple(found.shape)}, expected ({expected})")
    return found


def _sort_places(file: torch.Tensor, start: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Return the order of payloads in their files; an empty one comes before another at the same place."""
    order = length.argsort(stable=True)
    for column in (start, file):
        order = order[column[order].argsort(stable=True)]
    return order


def _count(extents: torch.Tensor) -> torch.Tensor:
    """Return the products of sizes as floats, sizes of 0 left out."""
    return extents.clamp(min=1).double().prod(1)


def _require(fine: bool, name: str, fault: str) -> None:
    if not fine:
        raise CorruptCheckpointError(f"its column {name!r} {fault}")


def _describe_object(name: str) -> ShardedObject | None:
    """Return the description of an object; None if its name is not that of one of a grid, which loads ask for."""
    try:
        found = PlainObject.empty_from_unique_key(name)
    except CheckpointingException:
        return None
    return None if isinstance(found, PlainObject) else found
