"""Which save a directory is of: its record's own digest says it, in the last bytes of ``shardckpt.json``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.manifest import RECORD_LIMIT, RECORD_NAME
from shardckpt.storage.filesystem import close_file, is_there, open_existing, read_file, read_into

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest import Record

#: The record ends with its digest; what a later release may write after it is looked for in the whole file.
_TAIL_BYTES = 128


def is_of_save(directory: Path, record: Record | None) -> bool:
    """Whether a directory's ``shardckpt.json`` is that record; None stands for a directory that has none.

    Raises:
        StorageError: it cannot be read.
    """
    path = directory / RECORD_NAME
    if not is_there(path):
        return record is None
    if record is None:
        return False
    digest = record.self_digest.encode()
    return digest in _tail(path) or digest in read_file(path, RECORD_LIMIT)


def _tail(path: Path) -> bytes:
    fd, size = open_existing(path)
    try:
        tail = bytearray(min(size, _TAIL_BYTES))
        read_into(fd, path, memoryview(tail), size - len(tail))
    finally:
        close_file(fd)
    return bytes(tail)


__all__ = ["is_of_save"]
