"""The outline of a checkpoint: what is stored, by the bytes of the index alone, without torch.

Importing torch takes longer than to list 100,000 tensors. What is not as this library writes it is left to the index
(:mod:`shardckpt_safetensors.index`), which checks everything and says what is wrong.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardckpt.errors import CheckpointingException
from shardckpt.plugins import Outline
from shardckpt.storage import LENGTH_BYTES, header_length, parse_head, parse_json, read_recorded_file
from shardckpt_safetensors.dtype_names import DTYPES
from shardckpt_safetensors.index_header import BLOCK_SCALES, COMMON_FILE, FEATURE, HEADER, INDEX_FILE, parse_header

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from shardckpt.manifest import Record
    from shardckpt.storage import FileEntry

#: How a column of integers of each kind is read.
_CODES: dict[str, Literal["B", "h", "i", "q"]] = {"U8": "B", "I16": "h", "I32": "i", "I64": "q"}
#: Most commas in the header of the common state that is looked at here.
_MOST_PARTS = 1 << 18
_MOST_ELEMENTS = 2**53


class _UnusualError(Exception):
    """The index has what is left to the class that checks all of it."""


def read_outline(directory: Path, record: Record) -> Outline | None:
    """Return what a checkpoint stores, or None to leave it to the strategy.

    Args:
        directory: The checkpoint, on this machine, held open.
        record: What its ``shardckpt.json`` says.

    Returns:
        None if its index is in several parts, has block scales or anything unexpected, or a file is damaged.
    """
    if sys.byteorder != "little":
        return None
    try:
        index = _File.read(directory, record, INDEX_FILE)
        common = _list_common(_File.read(directory, record, COMMON_FILE))
        return _outline(index, record, common)
    except (CheckpointingException, _UnusualError, LookupError, TypeError, ValueError, OverflowError):
        return None


class _File(NamedTuple):
    """A safetensors file in memory."""

    data: memoryview
    metadata: dict[str, str]
    entries: dict[str, FileEntry]

    @classmethod
    def read(cls, directory: Path, record: Record, name: str) -> _File:
        data = memoryview(read_recorded_file(directory, record, name))
        length = header_length(bytes(data[:LENGTH_BYTES]), len(data), name)
        found = parse_head(data[LENGTH_BYTES : LENGTH_BYTES + length], len(data), name, _MOST_PARTS)
        return cls(data, *found)

    def column(self, name: str, below: int | None = None) -> list[int]:
        """Return the integers of a column, row by row; all are at least 0, and less than ``below``."""
        entry = self.entries[name]
        found: list[int] = self.data[entry.start : entry.stop].cast(_CODES[entry.kind]).tolist()
        _require(not found or (min(found) >= 0 and (below is None or max(found) < below)))
        return found


def _outline(index: _File, record: Record, common: list[str]) -> Outline:
    header = parse_header(index.metadata[HEADER])
    _require(header.id == record.save_id)
    _require(FEATURE not in header.required_features and BLOCK_SCALES not in header.optional_features)
    entry = index.entries["text"]
    text, ends = bytes(index.data[entry.start : entry.stop]), index.column("text_end", len(index.data))
    _require(ends == sorted(ends) and b"\0" not in text)
    strings = [text[start:end].decode() for start, end in zip([0, *ends], ends, strict=False)]
    keys = _join(strings, index.column("tensor", len(strings)))
    codes = index.column("tensor_dtype", len(header.dtypes))
    shapes = _cut_rows(index.column("tensor_shape"), index.column("tensor_axes"))
    _require(len(codes) == len(shapes) == len(keys))
    aliases = index.column("alias_tensor", len(keys))
    names = keys + _join(strings, index.column("alias", len(strings)))
    objects = _join(strings, index.column("object", len(strings)))
    _require(len(names) == len(keys) + len(aliases) and len({*names, *objects}) == len(names) + len(objects))
    _require(all({*names, *objects}))
    _require(all(map(_is_of_grid, objects)))
    known = [DTYPES[name] for name in header.dtypes]
    dtypes = [known[code].torch_name for code in codes]
    return Outline(
        names,
        dtypes + [dtypes[number] for number in aliases],
        shapes + [shapes[number] for number in aliases],
        {dtype.torch_name: dtype.itemsize for dtype in known},
        objects,
        common,
    )


def _join(strings: list[str], pairs: list[int]) -> list[str]:
    """Return names, each of which is two strings."""
    return [strings[first] + strings[second] for first, second in zip(pairs[::2], pairs[1::2], strict=True)]


def _cut_rows(extents: list[int], axes: list[int]) -> list[tuple[int, ...]]:
    """Return the shape in each row, which has 1 behind it."""
    width = max(axes, default=0)
    _require(len(extents) == width * len(axes))
    rows = (
        [tuple(extents[start : start + width]) for start in range(0, len(extents), width)]
        if width
        else [()] * len(axes)
    )
    kinds = set(zip(rows, axes, strict=True))  # most of many tensors have one of a few shapes
    _require(
        all({*row[count:]} <= {1} and math.prod(max(size, 1) for size in row) < _MOST_ELEMENTS for row, count in kinds)
    )
    return [row[:count] for row, count in zip(rows, axes, strict=True)]


def _list_common(file: _File) -> list[str]:
    """Return the names in the common state."""
    tree = parse_json(file.metadata["tree"].encode())
    _require(isinstance(tree, dict) and not any(name.startswith("$") for name in tree))
    return sorted(tree)


def _is_of_grid(name: str) -> bool:
    """Return whether an object's name is that of a ShardedObject with an offset and a shape."""
    _, found, tail = name.rpartition("/shard_")
    parts: Iterable[list[str]] = [part.split(".") for part in tail.split("_")]
    offset, *shape = parts
    return (
        bool(found) and len(shape) == 1 and len(shape[0]) == len(offset) and all(map(str.isdecimal, offset + shape[0]))
    )


def _require(fine: bool) -> None:
    if not fine:
        raise _UnusualError


__all__ = ["read_outline"]
