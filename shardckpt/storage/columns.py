"""Columns of integers and names as the bytes of a safetensors file: what tables are on the wire and on the disk.

Format: https://github.com/huggingface/safetensors#format. Written here, because safetensors' own writer needs numpy;
taken apart by safetensors. Integers are as narrow as a column allows, names are one JSON list a column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import safetensors
import torch

from shardckpt.errors import CorruptCheckpointError
from shardckpt.tensors import tensor_bytes

#: Integers that are not negative, of any shape, or text.
Column: TypeAlias = torch.Tensor | Sequence[str]

_INTEGERS = {torch.uint8: "U8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64"}
_DTYPES = {kind: dtype for dtype, kind in _INTEGERS.items()}
_ALIGN = 8


def pack(columns: Mapping[str, Column]) -> bytes:
    """The columns as one file.

    Args:
        columns: By name.
    """
    header: dict[str, object] = {}
    parts: list[memoryview | bytes] = []
    end = 0
    for name, column in columns.items():
        kind, shape, data = _narrow(column) if isinstance(column, torch.Tensor) else _text(column)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + len(data)]}
        parts.append(data)
        end += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


class Columns:
    """The columns of a packed file.

    Args:
        data: The bytes that :func:`pack` gave.
        source: Named in errors.

    Raises:
        CorruptCheckpointError: they are not such bytes.
    """

    def __init__(self, data: bytes, source: str) -> None:
        self._source = source
        try:
            self._found: dict[str, dict[str, Any]] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as exc:
            raise CorruptCheckpointError(f"{source} is not a table of columns: {exc}") from exc

    def integers(self, name: str) -> torch.Tensor:
        """A column of integers, as int64."""
        column = self._column(name)
        dtype = _DTYPES.get(column["dtype"])
        if dtype is None:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is of {column['dtype']}")
        if not column["data"]:  # of which torch makes no tensor
            return torch.empty(column["shape"], dtype=torch.int64, device="cpu")
        found = torch.frombuffer(column["data"], dtype=dtype).to(torch.int64)
        if dtype is not torch.uint8 and int(found.min()) < 0:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} has {int(found.min())}")
        return found if len(column["shape"]) == 1 else found.view(column["shape"])

    def texts(self, name: str) -> list[str]:
        """A column of text."""
        try:
            found = json.loads(self._column(name)["data"].decode())
        except (ValueError, RecursionError) as exc:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is not JSON: {exc}") from exc
        if not isinstance(found, list) or not set(map(type, found)) <= {str}:
            raise CorruptCheckpointError(f"{self._source}: its column {name!r} is not a list of text")
        return found

    def _column(self, name: str) -> dict[str, Any]:
        """What the file says of a column: its dtype by safetensors' name, shape and bytes."""
        if name not in self._found:
            raise CorruptCheckpointError(f"{self._source} has no column {name!r}")
        return self._found[name]


def _narrow(column: torch.Tensor) -> tuple[str, list[int], memoryview]:
    """The column in the narrowest dtype that holds it."""
    most = int(column.max()) if column.numel() else 0
    dtype = next(dtype for dtype in _INTEGERS if most <= torch.iinfo(dtype).max)
    return _INTEGERS[dtype], list(column.shape), tensor_bytes(column.to(dtype).contiguous())


def _text(values: Sequence[str]) -> tuple[str, list[int], bytes]:
    data = json.dumps(list(values), separators=(",", ":")).encode()
    return "U8", [len(data)], data


__all__ = ["Column", "Columns", "pack"]
