"""The generations of a checkpoint at a URL: find and delete the generations that no reader needs any longer.

The first save at a URL has its files at the URL itself. Each overwrite puts its own into a generation, a folder that
the marker at the URL then names (:mod:`shardckpt.commit.replacement`).
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError, VersionTooNewError
from shardckpt.manifest.models import Record
from shardckpt.manifest.names import INTEGRITY_NAME, RECORD_LIMIT, RECORD_NAME, find_generation
from shardckpt.storage.input_file import read_file
from shardckpt.storage.remote import ListsFolders, attempt

if TYPE_CHECKING:
    from collections.abc import Collection

    from shardckpt.storage.remote import RemotePath

logger = logging.getLogger(__name__)


def list_recorded(place: RemotePath, found: Collection[str]) -> set[str] | None:
    """Return the files that the record at a URL names: none without a record, None if it cannot be read."""
    if RECORD_NAME not in found:
        return set()
    path = place.refresh() / RECORD_NAME
    try:
        return set(Record.parse(read_file(path, RECORD_LIMIT)).list_files())
    except (ValueError, RecursionError, CorruptCheckpointError, VersionTooNewError) as exc:
        logger.warning("%s does not say which are the checkpoint's: %s", path, str(exc).partition("\n")[0])
        return None


def list_first_save(place: RemotePath, found: Collection[str]) -> set[str]:
    """Return the leftovers of the first save at a URL, which an overwrite has replaced."""
    recorded = list_recorded(place, found)
    return {*recorded, INTEGRITY_NAME, RECORD_NAME}.intersection(found) if recorded else set()


def delete_record_last(place: RemotePath, names: Collection[str]) -> None:
    """Delete objects at a URL, the record last: by it another call finds the others."""
    place.delete_all({*names} - {RECORD_NAME})
    if RECORD_NAME in names:
        (place / RECORD_NAME).delete()


def delete_generations(place: RemotePath, found: Collection[str], generations: Collection[str]) -> None:
    """Delete all objects of some generations, and their folders where the store has folders."""
    place.delete_all({name for name in found if find_generation(name) in generations})
    if isinstance(place.folder, ListsFolders):
        for name in generations:
            attempt("remove the folder", place / name, partial(place.folder.remove_folder, name))
