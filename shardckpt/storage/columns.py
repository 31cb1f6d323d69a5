"""Columns of integers and text as the bytes of a safetensors file: the form of tables on the wire and on the disk.

Format: https://github.com/huggingface/safetensors#format. The writer is here because that of safetensors needs numpy;
safetensors parses. Integers have the narrowest dtype that holds a column; a column of text is one JSON list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import safetensors
import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.safetensors_header import HeaderEntry, encode_header
from shardckpt.tensors import tensor_bytes

#: Integers, not negative, of any shape; or text.
Column: TypeAlias = torch.Tensor | Sequence[str]

_INTEGERS = {torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"}
_DTYPES = {kind: dtype for dtype, kind in _INTEGERS.items()}


def pack_columns(columns: Mapping[str, Column]) -> bytes:
    """Pack columns into one safetensors file.

    Args:
        columns: Integer tensors of any shape, or sequences of text, by name.

    Returns:
        The bytes of the file, for :class:`Columns`.
    """
    entries: list[HeaderEntry] = []
    parts: list[memoryview | bytes] = []
    for name, column in columns.items():
        kind, shape, data = _narrow(column) if isinstance(column, torch.Tensor) else _text(column)
        entries.append(HeaderEntry(name, kind, shape, len(data)))
        parts.append(data)
    return b"".join([encode_header(entries), *parts])


class Columns:
    """The columns of a packed file.

    Args:
        data: The bytes that :func:`pack_columns` returned.
        source: Named in errors.

    Raises:
        CorruptCheckpointError: the bytes are no safetensors file.
    """

    def __init__(self, data: bytes, source: str) -> None:
        self._source = source
        try:
            self._found: dict[str, dict[str, Any]] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as exc:
            raise CorruptCheckpointError(f"{source} is not a table of columns: {exc}") from exc

    def has(self, name: str) -> bool:
        """Return whether there is a column of this name."""
        return name in self._found

    def integers(self, name: str) -> torch.Tensor:
        """Return a column of integers as an int64 tensor of its shape.

        Raises:
            CorruptCheckpointError: there is no such column, or it has another dtype or negative values.
        """
        column = self._column(name)
        dtype = _DTYPES.get(column["dtype"])
        if dtype is None:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is of {column['dtype']}")
        if not column["data"]:  # torch.frombuffer refuses an empty buffer
            return torch.empty(column["shape"], dtype=torch.int64, device="cpu")
        found = torch.frombuffer(column["data"], dtype=dtype).to(torch.int64)
        if dtype is not torch.uint8 and int(found.min()) < 0:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} has {int(found.min())}")
        return found if len(column["shape"]) == 1 else found.view(column["shape"])

    def texts(self, name: str) -> list[str]:
        """Return a column of text as a list of strings.

        Raises:
            CorruptCheckpointError: there is no such column, or it is not a JSON list of text.
        """
        try:
            found = json.loads(self._column(name)["data"].decode())
        except (ValueError, RecursionError) as exc:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is not JSON: {exc}") from exc
        if not isinstance(found, list) or not set(map(type, found)) <= {str}:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is not a list of text")
        return found

    def _column(self, name: str) -> dict[str, Any]:
        """Return a column as safetensors parsed it: its dtype by safetensors' name, shape and bytes."""
        if name not in self._found:
            raise CorruptCheckpointError(f"{self._source} has no column {name!r}")
        return self._found[name]


def _narrow(column: torch.Tensor) -> tuple[str, list[int], memoryview]:
    """Convert a column to the narrowest dtype that holds it; return the dtype's name, the shape and the bytes."""
    most = int(column.max()) if column.numel() else 0
    # no unsigned 16 to 64 bit: torch computes little with them
    dtype = next(dtype for dtype in _INTEGERS if most <= torch.iinfo(dtype).max)
    return _INTEGERS[dtype], list(column.shape), tensor_bytes(column.to(dtype).contiguous())


def _text(values: Sequence[str]) -> tuple[str, list[int], bytes]:
    data = json.dumps(list(values), separators=(",", ":")).encode()
    return "U8", [len(data)], data
