"""Whether a directory still holds the save that a reader was opened on; a record's own digest identifies the save."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.manifest import RECORD_LIMIT, RECORD_NAME
from shardckpt.storage.abilities import on_store
from shardckpt.storage.directory import detect_replacement, real_path, refresh_listing, was_replaced
from shardckpt.storage.filesystem import close_file, is_there, open_existing, read_file, read_into

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.manifest import Manifest, Record

#: Bytes at the end of a record that hold its digest. A later release may write more after it: then all bytes are read.
_TAIL_BYTES = 128


class OpenedSave:
    """The save that a reader was opened on.

    Args:
        place: The checkpoint: a directory, held open if it is on this machine, or a folder on a store.
        manifest: Its manifest, as read when the reader was opened.
    """

    def __init__(self, place: Path, manifest: Manifest) -> None:
        self._place = place
        self._manifest = manifest

    def was_replaced(self) -> bool:
        """Return whether the save was replaced or removed; of a local directory that is not held open, always False.

        Raises:
            StorageError: the store does not answer.
        """
        remote = on_store(self._place)
        if remote is None:
            return was_replaced(self._place)
        record = self._manifest.record
        return (record is not None and not is_of_save(refresh_listing(remote), record)) or has_changed(remote)

    def detect_replacement(self) -> AbstractContextManager[None]:
        """Return a context that turns an error into CheckpointReplacedError if another save is there now."""
        return detect_replacement(real_path(self._place), self.was_replaced)


def has_changed(place: Path) -> bool:
    """Return whether a directory was replaced since it was opened.

    A folder on a store was replaced if an object of its first listing is gone or has another size.
    """
    remote = on_store(place)
    if remote is None:
        return was_replaced(place)
    before, after = ({path.name: path.size for path in at.iterdir()} for at in (remote, refresh_listing(remote)))
    return not before.items() <= after.items()


def is_of_save(directory: Path, record: Record | None) -> bool:
    """Return whether a directory's ``shardckpt.json`` is that record; None stands for a directory without one.

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


__all__ = ["OpenedSave", "has_changed", "is_of_save"]
