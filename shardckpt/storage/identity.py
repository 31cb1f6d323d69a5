"""Which save a directory is of, and whether it is there still: a record's own digest tells it from every other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.manifest import RECORD_LIMIT, RECORD_NAME
from shardckpt.storage.abilities import on_store
from shardckpt.storage.directory import detect_replacement, listed_anew, real_path, was_replaced
from shardckpt.storage.filesystem import close_file, is_there, open_existing, read_file, read_into

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from shardckpt.manifest import Manifest, Record

#: The record ends with its digest; what a later release may write after it is looked for in the whole file.
_TAIL_BYTES = 128


class OpenedSave:
    """The save that a reader was opened on.

    Args:
        place: The checkpoint: a directory, held open if it is a local one, or on a store.
        manifest: What it says of itself.
    """

    def __init__(self, place: Path, manifest: Manifest) -> None:
        self._place = place
        self._manifest = manifest

    def was_replaced(self) -> bool:
        """Whether another save, or none, is where it was; of a local one, if it is held open.

        Raises:
            StorageError: the store does not answer.
        """
        remote = on_store(self._place)
        if remote is None:
            return was_replaced(self._place)
        record = self._manifest.record
        return (record is not None and not is_of_save(listed_anew(remote), record)) or has_changed(remote)

    def detect_replacement(self) -> AbstractContextManager[None]:
        """A context that raises CheckpointReplacedError in the place of an error, if another save is there now."""
        return detect_replacement(real_path(self._place), self.was_replaced)


def has_changed(place: Path) -> bool:
    """Whether a directory was replaced since it was opened.

    A folder on a store was if it no longer has all objects that it had when it was listed, in the same sizes.
    """
    remote = on_store(place)
    if remote is None:
        return was_replaced(place)
    before, after = ({path.name: path.size for path in at.iterdir()} for at in (remote, listed_anew(remote)))
    return not before.items() <= after.items()


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


__all__ = ["OpenedSave", "has_changed", "is_of_save"]
