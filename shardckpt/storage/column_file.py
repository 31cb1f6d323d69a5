"""A file of columns, read without torch: the columns of :mod:`shardckpt.storage.columns`, in plain lists."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal, NamedTuple

from shardckpt.errors import CorruptCheckpointError
from shardckpt.storage.recorded_file import read_recorded_file
from shardckpt.storage.safetensors_header import LENGTH_BYTES, header_length, parse_head

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest.models import Record
    from shardckpt.manifest.plain import PlainRecord
    from shardckpt.storage.safetensors_header import FileEntry

#: How a column of integers of each kind is read, on a little-endian machine.
_CODES: dict[str, Literal["B", "h", "i", "q"]] = {"U8": "B", "I16": "h", "I32": "i", "I64": "q"}


class ColumnFile(NamedTuple):
    """A safetensors file in memory.

    Attributes:
        name: Its name in the checkpoint.
        data: Its bytes.
        metadata: Its metadata.
        entries: Where each column is.
    """

    name: str
    data: memoryview
    metadata: dict[str, str]
    entries: dict[str, FileEntry]

    @classmethod
    def read(
        cls, directory: Path, record: PlainRecord | Record, name: str, most_parts: int | None = None
    ) -> ColumnFile:
        """Read a file; the first three arguments and the errors are as for :func:`read_recorded_file`.

        Args:
            directory: The checkpoint.
            record: Its record.
            name: The file.
            most_parts: The most commas that its header may have.
        """
        return cls.parse(read_recorded_file(directory, record, name), name, most_parts)

    @classmethod
    def parse(cls, content: bytes | bytearray | memoryview, name: str, most_parts: int | None = None) -> ColumnFile:
        """Return the columns in the bytes of a file.

        Args:
            content: The bytes.
            name: The file, for errors.
            most_parts: As for :meth:`read`.

        Raises:
            CorruptCheckpointError: They are no safetensors file.
        """
        data = memoryview(content)
        length = header_length(bytes(data[:LENGTH_BYTES]), len(data), name)
        head = data[LENGTH_BYTES : LENGTH_BYTES + length]
        found = parse_head(head, len(data), name, *([] if most_parts is None else [most_parts]))
        return cls(name, data, *found)

    def integers(self, name: str, below: int | None = None) -> list[int]:
        """Return a column of integers, row by row.

        Args:
            name: The column.
            below: An exclusive upper bound of all values.

        Raises:
            CorruptCheckpointError: One is negative, or too large.
        """
        entry = self._find(name)
        if entry.kind not in _CODES:
            raise CorruptCheckpointError(f"{self.name}: its column {name!r} is of {entry.kind}")
        found: list[int] = self.data[entry.start : entry.stop].cast(_CODES[entry.kind]).tolist()
        is_signed = entry.kind != "U8"
        if found and ((is_signed and min(found) < 0) or (below is not None and max(found) >= below)):
            raise CorruptCheckpointError(f"{self.name}: its column {name!r} has a number out of bounds")
        return found

    def bytes_of(self, name: str) -> bytes:
        """Return the bytes of a column."""
        entry = self._find(name)
        return bytes(self.data[entry.start : entry.stop])

    def texts(self, name: str) -> list[str]:
        """Return a column of text.

        Raises:
            CorruptCheckpointError: It is not a JSON list of text.
        """
        return parse_texts(self.bytes_of(name), name, self.name)

    def _find(self, name: str) -> FileEntry:
        if name not in self.entries:
            raise CorruptCheckpointError(f"{self.name} has no column {name!r}")
        return self.entries[name]


def parse_texts(data: bytes, name: str, source: str) -> list[str]:
    """Parse a column of text; CorruptCheckpointError if it is not a JSON list of text."""
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError) as exc:
        raise CorruptCheckpointError(f"{source}: its column {name!r} is not JSON: {exc}") from exc
    if not isinstance(found, list) or not set(map(type, found)) <= {str}:
        raise CorruptCheckpointError(f"{source}: its column {name!r} is not a list of text")
    return found
