"""Remove checkpoints: one step makes each invisible to loads, and then its files are deleted; a crash leaves no half.

A directory is renamed to ``.<name>.shardckpt-removed-<id>`` (a tombstone), which is durable before the first file is
deleted. A store has no rename: there an in-progress object is uploaded, and ``metadata.json`` is deleted first.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardckpt.commit.claim import REMOVAL_IN_PROGRESS, list_marks, without_others
from shardckpt.commit.generations import list_recorded
from shardckpt.commit.leftovers import belongs_to, find_leftovers, remove_free
from shardckpt.commit.staging_names import REMOVED, new_save_id, temporary_name
from shardckpt.manifest.names import MARKER_NAME, RECORD_NAME, find_generation
from shardckpt.storage.abilities import on_store
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.storage.remote import list_objects

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.storage.remote import RemotePath


def remove_checkpoint(path: Path) -> None:
    """Make a checkpoint absent in one step: a directory becomes a tombstone; of a store its objects are deleted, too.

    It is a StorageError, too, if some objects could not be deleted.
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


def clear_tombstones(folder: Path, owned: Callable[[str], bool]) -> None:
    """Remove the tombstones in a folder, also those that a crash left; log a warning for each whose removal fails.

    ``owned`` returns whether to remove one, given the :func:`stem` of the checkpoint's name.
    """
    remove_free(leftover for leftover in find_leftovers(folder, owned) if leftover.kind == REMOVED)


def clear_tombstones_of(path: Path) -> None:
    """Remove the tombstones of a checkpoint, which are next to its directory; a URL has none."""
    if on_store(path) is None:
        clear_tombstones(path.parent, belongs_to(path))


def delete_checkpoint(target: RemotePath) -> None:
    """Delete a checkpoint's objects from a store; after a crash no load finds it, and another call continues.

    These are all objects at its URL, its generations, and what its record names in other folders, where the rest may be
    anybody's. Without a record, as of another library, they are all but those of checkpoints in folders below. If some
    could not be deleted, it is a StorageError.
    """
    is_continued = REMOVAL_IN_PROGRESS in list_marks(target)
    # before the marker goes: what a crash leaves without a marker must be known as a removal, not as a save
    (target / REMOVAL_IN_PROGRESS).write(b"The checkpoint in this place is being removed.\n")
    (target / MARKER_NAME).delete()  # before all other objects: without it no load begins
    rest = _find_own(target, is_continued=is_continued) - {MARKER_NAME, REMOVAL_IN_PROGRESS, RECORD_NAME}
    target.delete_all(rest)
    # after what it names, which a call that continues finds by it
    (target / RECORD_NAME).delete()
    # last: it marks what a crash leaves as a removal that another call continues
    (target / REMOVAL_IN_PROGRESS).delete()


def _find_own(target: RemotePath, *, is_continued: bool) -> set[str]:
    """Return the objects at a checkpoint's URL that are the checkpoint's; a removal may have deleted its record."""
    found = set(list_objects(target.folder))
    if RECORD_NAME not in found and not is_continued:
        return without_others(found)
    in_folders = {name for name in found if "/" in name and not find_generation(name)}
    if not in_folders:
        return found
    return found - (in_folders - (list_recorded(target, found) or set()))


def is_half_deleted(directory: Path) -> bool:
    """Return whether a removal from a store has begun and not ended; False for a local directory."""
    return REMOVAL_IN_PROGRESS in list_marks(directory) and not (directory / MARKER_NAME).exists()
