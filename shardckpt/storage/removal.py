"""Remove checkpoints: one step makes each invisible to loads, and then its files are deleted; a crash leaves no half.

A directory is renamed to ``.<name>.shardckpt-removed-<id>`` (a tombstone), which is durable before the first file is
deleted. A store has no rename: there an in-progress object is uploaded, and ``metadata.json`` is deleted first.
"""

from __future__ import annotations

import functools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.manifest import MARKER_NAME
from shardckpt.storage.abilities import can_rename
from shardckpt.storage.filesystem import naming
from shardckpt.storage.leftovers import create_spool, find_leftovers, remove_free
from shardckpt.storage.remote import RemotePath, attempt
from shardckpt.storage.staging_names import REMOVED, new_save_id, temporary_name
from shardckpt.storage.upload import REMOVAL_IN_PROGRESS, delete_object, list_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.storage.remote import RemoteFolder


def make_tombstone(directory: Path) -> None:
    """Rename a directory to a tombstone, which :func:`clear_tombstones` removes.

    Raises:
        StorageError: the rename failed, or the directory does not exist.
    """
    with naming("rename, in order to remove,", directory):
        os.rename(directory, directory.with_name(temporary_name(directory.name, REMOVED, new_save_id())))


def clear_tombstones(folder: Path, owned: Callable[[str], bool]) -> None:
    """Remove the tombstones in a folder, also those that a crash left; log a warning for each whose removal fails.

    Args:
        folder: The parent directory of the removed checkpoints.
        owned: Returns whether to remove one, given the :func:`stem` of the checkpoint's name.
    """
    remove_free(leftover for leftover in find_leftovers(folder, owned) if leftover.kind == REMOVED)


def delete_checkpoint(folder: RemoteFolder) -> None:
    """Delete a checkpoint's objects from a store; after a crash no load finds it, and another call continues.

    Raises:
        StorageError: some objects could not be deleted.
    """
    target = RemotePath(folder)
    spool = create_spool()
    try:
        local = spool / REMOVAL_IN_PROGRESS
        with naming("write", local):
            local.write_text("The checkpoint in this place is being removed.\n")
        attempt("upload", target / REMOVAL_IN_PROGRESS, lambda: folder.upload(REMOVAL_IN_PROGRESS, local))
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    delete_object(folder, MARKER_NAME)  # before all other objects: without it no load begins
    rest = [name for name in list_folder(folder) if name not in (MARKER_NAME, REMOVAL_IN_PROGRESS)]
    with ThreadPoolExecutor(settings.remote_threads(), "shardckpt-delete") as threads:
        list(threads.map(functools.partial(delete_object, folder), rest))
    delete_object(
        folder, REMOVAL_IN_PROGRESS
    )  # last: it marks what a crash leaves as a removal that another call continues


def is_half_deleted(directory: Path) -> bool:
    """Return whether a removal from a store has begun and not ended; False for a local directory."""
    names = set() if can_rename(directory) else {path.name for path in directory.iterdir()}
    return REMOVAL_IN_PROGRESS in names and MARKER_NAME not in names


__all__ = ["clear_tombstones", "delete_checkpoint", "is_half_deleted", "make_tombstone"]
