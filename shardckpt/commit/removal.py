"""Remove checkpoints: one step hides each from loads, before its first file is deleted; a crash leaves no half.

A directory is renamed to ``.<name>.shardckpt-removed-<id>`` (a tombstone), and the rename is durable before a file is
deleted. A store has no rename: a mark that a removal is in progress is uploaded, then ``metadata.json`` is deleted.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardckpt.commit.claim import REMOVAL_IN_PROGRESS, list_marks, without_others
from shardckpt.commit.generations import list_recorded
from shardckpt.commit.leftovers import belongs_to, find_leftovers, remove_unused
from shardckpt.commit.staging_names import REMOVED, new_save_id, temporary_name
from shardckpt.errors import StorageError
from shardckpt.manifest.names import MARKER_NAME, RECORD_NAME, find_generation
from shardckpt.storage.abilities import on_store
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.storage.remote import list_objects

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.storage.remote import RemotePath

_IN_PROGRESS = b"The checkpoint in this place is being removed.\n"
#: Its text for a checkpoint that never had a record: a call that continues finds none in either case.
_IN_PROGRESS_WITHOUT_RECORD = _IN_PROGRESS + b"It has no record: its files in folders are removed, too.\n"


def remove_checkpoint(path: Path) -> None:
    """Make a checkpoint absent: rename a directory to a tombstone, or delete the objects from a store.

    It is a StorageError if the rename fails, or some objects could not be deleted.
    """
    if (remote := on_store(path)) is None:
        make_tombstone(path)
    else:
        delete_checkpoint(remote)


def make_tombstone(directory: Path) -> None:
    """Rename a directory to a tombstone, which :func:`clear_tombstones` removes.

    It is a StorageError if the rename fails, or the directory does not exist.
    """
    with wrap_os_errors("rename, in order to remove,", directory):
        os.rename(directory, directory.with_name(temporary_name(directory.name, REMOVED, new_save_id())))


def clear_tombstones(folder: Path, is_wanted: Callable[[str], bool]) -> None:
    """Remove the tombstones in a folder, also those that a crash has left; warn of each whose removal fails.

    ``is_wanted`` selects them by the stem of the checkpoint's name.
    """
    remove_unused(leftover for leftover in find_leftovers(folder, is_wanted) if leftover.kind == REMOVED)


def clear_tombstones_of(path: Path) -> None:
    """Remove the tombstones of a checkpoint, which are next to its directory; a URL has none."""
    if on_store(path) is None:
        clear_tombstones(path.parent, belongs_to(path))


def delete_checkpoint(target: RemotePath) -> None:
    """Delete a checkpoint's objects from a store; after a crash no load finds it, and another call continues.

    Its objects are all objects directly at its URL, its generations, and the objects in folders that its record names:
    others there may have any owner. Without a record, as of another library, they are all objects below the URL except
    those of checkpoints in folders. If some could not be deleted, it is a StorageError.
    """
    had_record = _had_record(target)
    # first: the remains of a crash, without a marker, must be known as a removal, not as a save
    (target / REMOVAL_IN_PROGRESS).write(_IN_PROGRESS if had_record else _IN_PROGRESS_WITHOUT_RECORD)
    (target / MARKER_NAME).delete()  # before its files: without it no load begins
    files = _find_own(target, had_record=had_record) - {MARKER_NAME, REMOVAL_IN_PROGRESS, RECORD_NAME}
    target.delete_all(files)
    (target / RECORD_NAME).delete()  # after the files: a call that continues finds those in folders by it
    (target / REMOVAL_IN_PROGRESS).delete()


def _had_record(target: RemotePath) -> bool:
    """Return whether a checkpoint has a record, or had one when the removal began that this call continues."""
    names = {path.name for path in target.iterdir()}
    if RECORD_NAME in names or REMOVAL_IN_PROGRESS not in names:
        return RECORD_NAME in names
    try:
        text = (target / REMOVAL_IN_PROGRESS).read_range(0, 2 * len(_IN_PROGRESS_WITHOUT_RECORD))
    except StorageError as exc:
        if isinstance(exc.__cause__, FileNotFoundError):  # another process has ended the removal
            return True
        raise
    return text != _IN_PROGRESS_WITHOUT_RECORD


def _find_own(target: RemotePath, *, had_record: bool) -> set[str]:
    """Return the objects below a checkpoint's URL that are its own, by the rule of :func:`delete_checkpoint`."""
    found = set(list_objects(target.folder))
    if RECORD_NAME not in found and not had_record:
        return without_others(found)
    # without the record, its files are gone, too: the files left in folders are not the checkpoint's
    in_folders = {name for name in found if "/" in name and not find_generation(name)}
    if not in_folders:
        return found
    return found - (in_folders - (list_recorded(target, found) or set()))


def is_half_deleted(directory: Path) -> bool:
    """Return whether a removal from a store has begun and not ended; False for a local directory."""
    return REMOVAL_IN_PROGRESS in list_marks(directory) and not (directory / MARKER_NAME).exists()
