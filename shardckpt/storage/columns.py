"""Columns of integers and text as the bytes of a safetensors file: the form of tables on the wire and on the disk.

Format: https://github.com/huggingface/safetensors#format. Integers have the narrowest dtype that holds a column; a
column of text is one JSON list. Wide columns come first, so that all are aligned, and are read without a copy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.column_file import parse_texts
from shardckpt.storage.safetensors_header import (
    LENGTH_BYTES,
    FileEntry,
    HeaderEntry,
    encode_header,
    header_length,
    parse_head,
)
from shardckpt.tensors.memory import tensor_bytes

#: Integers, not negative, of any shape; or text.
Column: TypeAlias = torch.Tensor | Sequence[str]

#: The dtypes of columns of integers, the narrowest first, and their names in the header.
INTEGERS = {torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"}
_DTYPES = {kind: dtype for dtype, kind in INTEGERS.items()}


class PackedColumns(NamedTuple):
    """Columns that are packed, without the metadata of the file: a plan keeps them for later saves.

    Attributes:
        entries: The header's entry of each column.
        data: The bytes of all columns.
    """

    entries: list[HeaderEntry]
    data: bytes

    @classmethod
    def pack(cls, columns: Mapping[str, Column]) -> PackedColumns:
        """Pack columns; the argument is as in :func:`pack_columns`."""
        found: list[tuple[HeaderEntry, memoryview | bytes, int]] = []
        for name, column in columns.items():
            if isinstance(column, torch.Tensor):
                dtype = narrow_dtype(column)
                kind, shape = INTEGERS[dtype], list(column.shape)
                data: memoryview | bytes = tensor_bytes(column.to(dtype).contiguous())
            else:
                data = json.dumps(list(column), separators=(",", ":")).encode()
                kind, shape = "U8", [len(data)]
            found.append((HeaderEntry(name, kind, shape, len(data)), data, _DTYPES[kind].itemsize))
        found.sort(key=lambda item: -item[2])
        return cls([entry for entry, _, _ in found], b"".join(data for _, data, _ in found))

    def to_bytes(self, metadata: Mapping[str, str] | None = None) -> bytes:
        """Return the bytes of the file; the argument is as in :func:`pack_columns`."""
        return encode_header(self.entries, metadata) + self.data


def pack_columns(columns: Mapping[str, Column], metadata: Mapping[str, str] | None = None) -> bytes:
    """Pack columns into one safetensors file.

    Args:
        columns: Integer tensors of any shape, or sequences of text, by name.
        metadata: Text by name, for the file's ``__metadata__``.

    Returns:
        The bytes of the file, for :class:`Columns`.
    """
    return PackedColumns.pack(columns).to_bytes(metadata)


class Columns:
    """The columns of a packed file.

    Args:
        data: The bytes that :func:`pack_columns` returned. A bytearray is not copied: do not change it.
        source: Named in errors.
        size: Bytes of the file where ``data`` are only the first; columns behind these can be located, not read.

    Attributes:
        metadata: The file's metadata.

    Raises:
        CorruptCheckpointError: the bytes are no safetensors file.
    """

    def __init__(self, data: bytes | bytearray, source: str, size: int | None = None) -> None:
        self._source = source
        size = len(data) if size is None else size
        # torch makes no tensor of bytes that cannot be written
        self._data = memoryview(data if isinstance(data, bytearray) else bytearray(data))
        length = header_length(bytes(data[:LENGTH_BYTES]), min(size, len(data)), source)
        head = self._data[LENGTH_BYTES : LENGTH_BYTES + length]
        self._found: dict[str, FileEntry]
        self.metadata, self._found = parse_head(head, size, source)

    def has(self, name: str) -> bool:
        """Return whether there is a column of this name."""
        return name in self._found

    def names(self) -> list[str]:
        """Return the names of the columns."""
        return list(self._found)

    def integers(self, name: str) -> torch.Tensor:
        """Return a column of integers as an int64 tensor of its shape.

        Raises:
            CorruptCheckpointError: there is no such column, or it has another dtype or negative values.
        """
        found = self.stored(name)
        if found.numel() and found.dtype is not torch.uint8 and int(found.min()) < 0:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} has {int(found.min())}")
        return found.to(torch.int64)

    def stored(self, name: str) -> torch.Tensor:
        """Return a column of integers in its stored dtype; values may be negative, which the caller has to check.

        Returns:
            It may be a view of the file's bytes: do not change it.

        Raises:
            CorruptCheckpointError: there is no such column, or it has another dtype.
        """
        entry = self._entry(name)
        dtype = _DTYPES.get(entry.kind)
        if dtype is None:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is of {entry.kind}")
        if entry.stop == entry.start:  # torch.frombuffer refuses an empty buffer
            return torch.empty(entry.shape, dtype=dtype, device="cpu")
        data = self._data[entry.start : entry.stop]
        if entry.start % dtype.itemsize:
            data = memoryview(bytearray(data))
        found = torch.frombuffer(data, dtype=dtype)
        return found if len(entry.shape) == 1 else found.view(tuple(entry.shape))

    def locate(self, name: str) -> FileEntry:
        """Return where a column is, and its dtype and shape, unchecked.

        Raises:
            CorruptCheckpointError: there is no such column.
        """
        return self._find(name)

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a column.

        Raises:
            CorruptCheckpointError: there is no such column.
        """
        entry = self._entry(name)
        return self._data[entry.start : entry.stop]

    def texts(self, name: str) -> list[str]:
        """Return a column of text as a list of strings.

        Raises:
            CorruptCheckpointError: there is no such column, or it is not a JSON list of text.
        """
        return parse_texts(bytes(self.raw(name)), name, self._source)

    def _entry(self, name: str) -> FileEntry:
        """Return where a column is that is to be read."""
        entry = self._find(name)
        if entry.stop > len(self._data):
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is not among its first columns")
        return entry

    def _find(self, name: str) -> FileEntry:
        if name not in self._found:
            raise CorruptCheckpointError(f"{self._source} has no column {name!r}")
        return self._found[name]


def narrow_dtype(column: torch.Tensor) -> torch.dtype:
    """Return the narrowest dtype that holds the values of a column."""
    most = int(column.max()) if column.numel() else 0
    # no unsigned 16 to 64 bit: torch computes little with them
    return next(dtype for dtype in INTEGERS if most <= torch.iinfo(dtype).max)
