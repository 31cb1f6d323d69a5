"""The generations of a checkpoint at a URL: what of them no reader needs any longer, and how it is deleted.

The first save at a URL has its files at the URL itself. Each overwrite puts its own into a generation, a folder that
the marker at the URL then names (:mod:`shardckpt.commit.replacement`).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.commit.deletion import delete_object, delete_objects
from shardckpt.errors import CorruptCheckpointError, VersionTooNewError
from shardckpt.manifest import (
    INTEGRITY_NAME,
    RECORD_LIMIT,
    RECORD_NAME,
    Record,
    find_generation,
)
from shardckpt.storage import ListsFolders, RemotePath, attempt, read_file

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.storage import RemoteFolder

logger = logging.getLogger(__name__)


def list_recorded(folder: RemoteFolder, found: Collection[str]) -> set[str] | None:
    """Return the files that the record at a URL names, of a checkpoint that may be half deleted.

    Args:
        folder: The URL's folder.
        found: Names of all objects at the URL.

    Returns:
        The names; empty if there is no record, None if it cannot be read.
    """
    if RECORD_NAME not in found:
        return set()
    path = RemotePath(folder) / RECORD_NAME
    try:
        return set(Record.parse(read_file(path, RECORD_LIMIT)).list_files())
    except (ValueError, RecursionError, CorruptCheckpointError, VersionTooNewError) as exc:
        logger.warning("%s does not say which are the checkpoint's: %s", path, str(exc).partition("\n")[0])
        return None


def list_first(folder: RemoteFolder, found: Collection[str]) -> set[str]:
    """Return what is left at a URL of the save that an overwrite has replaced, if that was the first one.

    Args:
        folder: The URL's folder.
        found: Names of all objects at the URL.
    """
    recorded = list_recorded(folder, found)
    return {*recorded, INTEGRITY_NAME, RECORD_NAME}.intersection(found) if recorded else set()


def delete_first(folder: RemoteFolder, names: Collection[str]) -> None:
    """Delete what :func:`list_first` returned; the record last, by which another call finds the others."""
    delete_objects(folder, {*names} - {RECORD_NAME})
    if RECORD_NAME in names:
        delete_object(folder, RECORD_NAME)


def delete_generations(folder: RemoteFolder, found: Collection[str], generations: Collection[str]) -> None:
    """Delete all objects of some generations, and their folders where the store has folders.

    Args:
        folder: The URL's folder.
        found: Names of all objects at the URL.
        generations: Names of the generations.
    """
    delete_objects(folder, {name for name in found if find_generation(name) in generations})
    if isinstance(folder, ListsFolders):
        remove_folder = folder.remove_folder
        for name in generations:
            attempt("remove the folder", RemotePath(folder) / name, partial(remove_folder, name))
