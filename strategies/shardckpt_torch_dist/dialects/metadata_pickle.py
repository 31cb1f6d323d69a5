"""Write ``.metadata`` from columns, without building DCP's objects: pickle opcodes are repeated as arrays.

An example object is pickled, with placeholders where the rows differ: its opcodes are a template. The template is
repeated once per row, and the columns overwrite the placeholders. Names, classes and functions are put into the memo at
the beginning of the pickle, and every row gets them from there by a number of fixed width.

A placeholder is a number whose highest byte no real number has, and whose lowest byte is its slot: the position of its
column. A memo number is first pickled as a persistent id, because pickle itself chooses the numbers of its memo.
"""

from __future__ import annotations

import io
import pickle
import re
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from shardckpt.planning import make_column, make_matrix, repeat_values
from shardckpt.tensors import tensor_bytes
from shardckpt_torch_dist.torch_private import StorageInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shardckpt.chunks import Item
    from shardckpt_torch_dist.dialects.stored import StoredIndex

#: About how many chunks and tensors are encoded at a time.
_WINDOW = 1 << 15
#: Protocol 2 has all the opcodes that are needed, and does not group them into frames.
_PROTOCOL = 2
#: Fields of the pickled properties of a tensor.
_PROPERTIES = 5
#: Numbers below this fit the opcode of four bytes; others take the one of eight.
_NARROW = 1 << 31
#: The highest byte of placeholders of four and of eight bytes, and of the persistent ids that become memo numbers.
_NARROW_SLOT, _WIDE_SLOT, _GET = 0x7A << 24, 0x7C << 56, 0x7B << 56
#: A persistent id (LONG1 of eight bytes, BINPERSID), whose low four bytes are a memo number.
_GETS = re.compile(rb"\x8a\x08(....)\0\0\0\x7bQ", re.DOTALL)
#: A placeholder with its slot: a narrow one (BININT or LONG_BINGET), or a wide one (LONG1 of eight bytes).
_SLOTS = re.compile(rb"[Jj](.)\0\0\x7a|\x8a\x08(.)\0{6}\x7c", re.DOTALL)
#: The slot that stands for any number of rows of another template, and its placeholders (LONG_BINGET) in opcodes.
_ROWS = 255
_HOLES = re.compile(rb"(?:j\xff\0\0\x7a)+")


def encode_metadata(index: StoredIndex, save_id: str) -> bytes:
    """Encode an index as ``.metadata``, a pickle of DCP's ``Metadata``, for the readers of DCP and Megatron.

    The index is of one of our own saves: each archive has one box, and no value is loose. No other save has this
    ``save_id``.
    """
    memo = _Memo()
    tensors, (object_entries, object_locations) = _Tensors(index, memo), _encode_objects(index.objects, memo)
    metadata = Metadata(_rows_slot(), storage_data=_rows_slot(), storage_meta=StorageMeta(save_id=save_id))
    start, middle, end = _HOLES.split(memo.opcodes(metadata))
    out = io.BytesIO()
    out.writelines([pickle.PROTO, bytes([_PROTOCOL]), memo.puts(), start])
    out.writelines(tensors.entries())
    out.writelines([object_entries, middle])
    out.writelines(tensors.locations())
    out.writelines([object_locations, end, pickle.STOP])
    return out.getvalue()


class _Name:
    """A placeholder for a name in an example."""

    def __init__(self, slot: int) -> None:
        self.placeholder = _NARROW_SLOT | slot


def _name(slot: int) -> Any:
    """Return a placeholder for a name, which DCP's classes do not check."""
    return _Name(slot)


def _numbers(slots: Iterable[int], *, wide: bool) -> list[int]:
    """Return placeholders for numbers in an example."""
    return [(_WIDE_SLOT if wide else _NARROW_SLOT) | slot for slot in slots]


def _rows_slot() -> dict[Any, Any]:
    """Return a placeholder for a dictionary; its two entries make pickle use SETITEMS, as for many entries."""
    return {_name(_ROWS): _name(_ROWS), _name(_ROWS): _name(_ROWS)}


class _Memo:
    """The names, classes and functions that the pickle writes once, in front."""

    def __init__(self) -> None:
        self._found: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        """Return the memo number of a name, class or function; a new one is added."""
        return self._found.setdefault(value, len(self._found) + 1)

    def column(self, values: Iterable[str]) -> torch.Tensor:
        """Return the memo numbers of names, int64 of shape (values,)."""
        found = self._found
        return make_column([found.setdefault(value, len(found) + 1) for value in values])

    def opcodes(self, *values: Any) -> bytes:
        """Return the opcodes that build the values, with names, classes and functions from the memo."""
        stream = io.BytesIO()
        for value in values:
            pickled = io.BytesIO()
            _Pickler(pickled, self).dump(value)
            stream.write(pickled.getvalue()[2:-1])  # without PROTO and STOP
        return _GETS.sub(rb"j\1", stream.getvalue())

    def puts(self) -> bytes:
        """Return the opcodes that fill the memo, by building a list: it gets number 0, its items the next ones."""
        return pickle.dumps(list(self._found), _PROTOCOL, fix_imports=False)[2:-1] + pickle.POP


class _Pickler(pickle.Pickler):
    """Takes names, classes and functions from the memo, and puts nothing else there."""

    def __init__(self, stream: io.BytesIO, memo: _Memo) -> None:
        super().__init__(stream, _PROTOCOL, fix_imports=False)
        self.fast = True  # no opcodes that put into the memo: its numbers are ours
        self._memo = memo

    def persistent_id(self, obj: Any) -> int | None:
        if isinstance(obj, _Name):
            return _GET | obj.placeholder
        if isinstance(obj, (str, type, torch.dtype, FunctionType)):
            return _GET | self._memo.number(obj)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TensorProperties):
            # without the strides that torch 2.15 adds: older releases read five fields only, and newer ones both forms
            reduced: Any = obj.__reduce_ex__(_PROTOCOL)
            return *reduced[:2], reduced[2][:_PROPERTIES]
        return NotImplemented


class _OpcodeTemplate:
    """The opcodes of an example, to be repeated with other names and numbers."""

    def __init__(self, opcodes: bytes) -> None:
        self._opcodes = torch.frombuffer(bytearray(opcodes), dtype=torch.uint8)
        found = [(match, match.lastindex or 0) for match in _SLOTS.finditer(opcodes)]
        self._slots = sorted((match[group][0], match.start(group), match.end()) for match, group in found)

    def rows(self, count: int, *columns: torch.Tensor) -> memoryview:
        """Repeat the opcodes ``count`` times, with the columns (int64 of shape (count,)) in the slots, in order."""
        table = self._opcodes.repeat(count, 1)
        for (_, start, end), column in zip(self._slots, columns, strict=True):
            dtype = torch.int32 if end - start == 4 else torch.int64  # noqa: PLR2004
            values = column.to(dtype, copy=True, memory_format=torch.contiguous_format)
            table[:, start:end] = values.view(-1, 1).view(torch.uint8)
        return tensor_bytes(table)


class _Wide(NamedTuple):
    """Whether a number takes eight bytes: those of boxes, the starts, and the lengths of ranges."""

    box: bool
    start: bool
    length: bool


class _TensorTemplates:
    """The templates of tensors with a dtype and a number of axes."""

    def __init__(self, axes: int, dtype: torch.dtype, wide: _Wide, memo: _Memo) -> None:
        numbers = _numbers(range(4, 4 + axes), wide=wide.box)
        self.location = _location_template(torch.Size(numbers), wide, memo)
        low, high = (torch.Size(_numbers(range(n, n + axes), wide=wide.box)) for n in (0, axes))
        self.chunk = _OpcodeTemplate(memo.opcodes(ChunkStorageMetadata(low, high)))
        size = torch.Size(_numbers(range(1, 1 + axes), wide=wide.box))
        tensor = TensorStorageMetadata(TensorProperties(dtype), size, [_name(_ROWS)] * 2)
        head, self.tail = _HOLES.split(memo.opcodes(_name(0), tensor))
        self.head = _OpcodeTemplate(head)


def _location_template(offset: torch.Size | None, wide: _Wide, memo: _Memo) -> _OpcodeTemplate:
    """Return the template of an entry of ``storage_data``: its slots are key, file, start, length, then the offset."""
    (start,), (length,) = _numbers([2], wide=wide.start), _numbers([3], wide=wide.length)
    return _OpcodeTemplate(memo.opcodes(MetadataIndex(_name(0), offset), StorageInfo(_name(1), start, length)))


def _encode_objects(objects: dict[str, Item], memo: _Memo) -> tuple[memoryview, memoryview]:
    """Return the opcodes of the objects: of their entries of ``state_dict_metadata``, and of ``storage_data``."""
    keys, files = memo.column(objects), memo.column(item.file for item in objects.values())
    starts = make_column([item.offset for item in objects.values()])
    lengths = make_column([item.length for item in objects.values()])
    entry = _OpcodeTemplate(memo.opcodes(_name(0), BytesStorageMetadata()))
    location = _location_template(None, _Wide(box=False, start=_is_wide(starts), length=_is_wide(lengths)), memo)
    return entry.rows(len(keys), keys), location.rows(len(keys), keys, files, starts, lengths)


class _Group(NamedTuple):
    """The tensors of a window that have the same templates, and their chunks, by number."""

    kind: _TensorTemplates
    tensors: torch.Tensor
    rows: torch.Tensor


class _Tensors:
    """The opcodes of the tensors, made window by window to bound the memory."""

    def __init__(self, index: StoredIndex, memo: _Memo) -> None:
        self._index = index
        self._keys, self._files = memo.column(index.keys), memo.column(index.files)
        self._counts = index.bounds.diff()
        self._box = index.chunks.box.pad_axes(max(map(len, index.shapes), default=0))
        kinds: dict[tuple[int, torch.dtype], int] = {}
        axes = map(len, index.shapes)
        self._kind_of = make_column(
            [kinds.setdefault(kind, len(kinds)) for kind in zip(axes, index.dtypes, strict=True)]
        )
        wide = _find_widths(index)
        self._kinds = [_TensorTemplates(*kind, wide, memo) for kind in kinds]

    def entries(self) -> Iterator[bytes | memoryview]:
        """Yield the opcodes of ``state_dict_metadata``."""
        for first, last in self._windows():
            entries = {group.kind: self._entries(group) for group in self._groups(first, last)}
            for number in self._kind_of[first:last].tolist():
                yield from next(entries[self._kinds[number]])
            yield pickle.SETITEMS + pickle.MARK

    def locations(self) -> Iterator[bytes | memoryview]:
        """Yield the opcodes of ``storage_data``."""
        chunks = self._index.chunks
        for first, last in self._windows():
            for kind, tensors, rows in self._groups(first, last):
                keys = repeat_values(self._keys[tensors], self._counts[tensors])
                columns = keys, self._files[chunks.file[rows]], chunks.start[rows], chunks.length[rows]
                yield kind.location.rows(len(rows), *columns, *self._axes(tensors, self._box.offset[rows]))
            yield pickle.SETITEMS + pickle.MARK

    def _windows(self) -> list[tuple[int, int]]:
        """Return windows of tensors [first, last), of about ``_WINDOW`` chunks each; a larger tensor is alone."""
        numbers = torch.arange(len(self._counts), device="cpu")
        windows = (self._index.bounds[:-1] + numbers) // _WINDOW
        ends = windows.bincount().cumsum(0).tolist()
        return [(first, last) for first, last in zip([0, *ends], ends, strict=False) if first < last]

    def _groups(self, first: int, last: int) -> Iterator[_Group]:
        kinds, counts = self._kind_of[first:last], self._counts[first:last]
        for kind in sorted(set(kinds.tolist())):
            mine = kinds == kind
            tensors, rows = mine.nonzero().view(-1), repeat_values(mine, counts).nonzero().view(-1)
            yield _Group(self._kinds[kind], tensors + first, rows + self._index.bounds[first])

    def _entries(self, group: _Group) -> Iterator[tuple[memoryview, memoryview, bytes]]:
        """Yield the opcodes of each tensor: before its chunks, of the chunks, and after them."""
        shapes = [self._index.shapes[number] for number in group.tensors.tolist()]
        sizes = make_matrix(shapes, len(shapes[0]), 1).unbind(1)
        heads = group.kind.head.rows(len(shapes), self._keys[group.tensors], *sizes)
        box = self._box.rows(group.rows)
        bounds = (self._axes(group.tensors, column) for column in (box.offset, box.extent))
        chunks = group.kind.chunk.rows(len(group.rows), *(column for columns in bounds for column in columns))
        counts = self._counts[group.tensors].tolist()
        for head, rows in zip(_split_rows(heads, [1] * len(counts)), _split_rows(chunks, counts), strict=True):
            yield head, rows, group.kind.tail

    def _axes(self, tensors: torch.Tensor, column: torch.Tensor) -> Sequence[torch.Tensor]:
        return column.unbind(1)[: len(self._index.shapes[int(tensors[0])])]


def _split_rows(rows: memoryview, counts: list[int]) -> Iterator[memoryview]:
    """Yield slices of the rows, of as many rows each as the counts say."""
    width = len(rows) // (sum(counts) or 1)
    end = 0
    for count in counts:
        start, end = end, end + count * width
        yield rows[start:end]


def _find_widths(index: StoredIndex) -> _Wide:
    chunks = index.chunks
    sizes = make_column([max(shape, default=0) for shape in index.shapes])
    boxes = (sizes, chunks.box.offset, chunks.box.extent)
    return _Wide(any(map(_is_wide, boxes)), _is_wide(chunks.start), _is_wide(chunks.length))


def _is_wide(column: torch.Tensor) -> bool:
    return column.numel() > 0 and int(column.max()) >= _NARROW
