"""Removing checkpoints: in one step each is one no more, and only then its files go; a crash leaves nothing to load.

A directory is renamed to ``.<name>.shardckpt-removed-<id>``, and that is durable before the first file goes. A store
has no rename: there an object says that the removal is under way, and ``metadata.json`` is the first to go.
"""

from __future__ import annotations

import functools
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.manifest import MARKER_NAME
from shardckpt.storage.abilities import can_rename
from shardckpt.storage.filesystem import naming
from shardckpt.storage.leftovers import create_spool, find_leftovers, remove_free
from shardckpt.storage.remote import RemotePath, attempt
from shardckpt.storage.staging_names import REMOVED, new_save_id, temporary_name
from shardckpt.storage.upload import REMOVAL_MARK, list_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.storage.remote import RemoteFolder


def make_tombstone(directory: Path) -> None:
    """Give a directory the name of a tombstone; :func:`clear_tombstones` removes it.

    Raises:
        StorageError: it has its old name, or was gone already.
    """
    with naming("rename, in order to remove,", directory):
        os.rename(directory, directory.with_name(temporary_name(directory.name, REMOVED, new_save_id())))


def clear_tombstones(folder: Path, owned: Callable[[str], bool]) -> None:
    """Remove the tombstones in a folder, those that a crash has left too; what cannot be removed stays, and is said.

    Args:
        folder: Where they are.
        owned: Whether one is to be removed, by the :func:`stem` of the name of what was there before.
    """
    remove_free(leftover for leftover in find_leftovers(folder, owned) if leftover.kind == REMOVED)


def delete_checkpoint(folder: RemoteFolder) -> None:
    """Delete a checkpoint's objects from a store; after a crash nothing is loaded, and another call goes on.

    Raises:
        StorageError: some are still there.
    """
    target = RemotePath(folder)
    spool = create_spool()
    try:
        mark = spool / REMOVAL_MARK
        with naming("write", mark):
            mark.write_text("The checkpoint in this place is being removed.\n")
        attempt("upload", target / REMOVAL_MARK, lambda: folder.upload(REMOVAL_MARK, mark))
    finally:
        shutil.rmtree(spool, ignore_errors=True)
    _delete(folder, MARKER_NAME)
    rest = [name for name in list_folder(folder) if name not in (MARKER_NAME, REMOVAL_MARK)]
    with ThreadPoolExecutor(settings.remote_threads(), "shardckpt-delete") as threads:
        list(threads.map(functools.partial(_delete, folder), rest))
    _delete(folder, REMOVAL_MARK)


def is_half_deleted(directory: Path) -> bool:
    """Whether a removal from a store has begun and not ended."""
    names = set() if can_rename(directory) else {path.name for path in directory.iterdir()}
    return REMOVAL_MARK in names and MARKER_NAME not in names


def _delete(folder: RemoteFolder, name: str) -> None:
    def deleted() -> None:
        with suppress(FileNotFoundError):
            folder.delete(name)

    attempt("delete", RemotePath(folder) / name, deleted)


__all__ = ["clear_tombstones", "delete_checkpoint", "is_half_deleted", "make_tombstone"]
