"""Whether a directory still holds the save that was opened; the digest in a record identifies the save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError
from shardckpt.manifest.names import RECORD_LIMIT, RECORD_NAME
from shardckpt.storage.abilities import has_local_files, on_store
from shardckpt.storage.directory import refresh_listing, was_replaced
from shardckpt.storage.filesystem import is_there
from shardckpt.storage.input_file import open_existing, read_file

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest.models import Manifest, Record

#: Bytes at the end of a record that hold its digest. A later release may write more after it: then all bytes are read.
_TAIL_BYTES = 128


def is_gone(place: Path, manifest: Manifest) -> bool:
    """Return whether the save with that manifest was replaced or removed since it was opened.

    The place is a directory, or a folder on a store. Of a local directory that is not held open the answer is always
    False.
    """
    record = None if has_local_files(place) else manifest.record
    return (record is not None and not is_of_save(refresh_listing(place), record)) or has_changed(place)


def has_changed(place: Path) -> bool:
    """Return whether a directory was replaced since it was opened.

    A folder on a store was replaced if an object of its first listing is gone or has another size.
    """
    return was_replaced(place) if (remote := on_store(place)) is None else remote.has_changed()


def is_of_save(directory: Path, record: Record | None) -> bool:
    """Return whether a directory's ``shardckpt.json`` is that record; None stands for a directory without one."""
    path = directory / RECORD_NAME
    if not is_there(path):
        return record is None
    if record is None:
        return False
    # a few bytes at the end of the file decide, so that a check after each read costs one small read
    digest = record.self_digest.encode()
    try:
        return digest in _tail(path) or digest in read_file(path, RECORD_LIMIT)
    except CorruptCheckpointError:  # it is shorter than when the folder was listed: another save's, a moment ago
        return False


def _tail(path: Path) -> bytes:
    with open_existing(path) as file:
        tail = bytearray(min(file.size, _TAIL_BYTES))
        file.read_into(memoryview(tail), file.size - len(tail))
    return bytes(tail)
