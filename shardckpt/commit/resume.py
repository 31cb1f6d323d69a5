"""Resume the write of a killed process: take over its staging directory or objects, with its journal."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING

from shardckpt.commit.claim import CLAIM, Claim, is_mark, parse_in_progress
from shardckpt.commit.commit import discard_staging, list_staging_directories, staging_path
from shardckpt.commit.owner import claim_name, release_name
from shardckpt.commit.staging_names import STAGING, get_save_id, parse_temporary
from shardckpt.commit.unfinished import explain_unfinished_kept, find_unfinished, remove_unfinished
from shardckpt.errors import StorageError
from shardckpt.manifest.names import MARKER_NAME, generation_name
from shardckpt.storage.filesystem import is_there
from shardckpt.storage.journal_log import FIRST_LINE, JOURNAL_NAME
from shardckpt.storage.remote import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from shardckpt.storage.journal import Journal
    from shardckpt.storage.remote import RemoteFolder

logger = logging.getLogger(__name__)


def adopt_staging(target: Path, journal: Journal) -> Path | None:
    """Take over the files of a killed process for a target, if the journal is of the same identity.

    Returns the staging directory, which this process owns now; None if there is none. The files of a process that may
    be alive stay untouched. Files for another source or other options are removed, after a warning.
    """
    for path in list_staging_directories(target):
        found = parse_temporary(path)
        if found is None or found.is_garbage or found.kind != STAGING or not _has_journal(path):
            continue
        if found.owner is None or found.owner.is_alive() is not False:
            continue
        mine = staging_path(target, get_save_id(path))
        claim_name(mine.name)  # before the rename: garbage collection in another thread removes unclaimed directories
        try:
            os.rename(path, mine)
        except OSError:  # another process was first
            release_name(mine.name)
            continue
        if _resume(journal, mine, target):
            return mine
        discard_staging(mine)
    return None


def _has_journal(staging: Path) -> bool:
    try:
        return is_there(staging / JOURNAL_NAME)
    except StorageError:  # no error: of another user, whose permissions this process need not have
        return False


def adopt_upload(
    target: RemotePath, found: Collection[str], journal: Journal, open_folder: Callable[[str], RemoteFolder]
) -> str:
    """Take over the objects of a killed process at a URL, as :func:`adopt_staging` does; return the save's id.

    ``found`` are the names of all objects there. It is ``""`` if there is nothing to continue; a dead process's objects
    of a first conversion are then removed.
    """
    marks = {name for name in found if is_mark(name)}
    is_first = MARKER_NAME not in found  # else it was overwriting, in a generation
    for save_id in filter(None, map(parse_in_progress, sorted(marks))):
        generation, claim = generation_name(save_id), Claim(target, save_id)
        within = "" if is_first else f"{generation}/"
        is_alone = not is_first or marks <= {CLAIM, claim.in_progress}
        # a generation with a marker may be the checkpoint already
        if f"{within}{FIRST_LINE}" not in found or f"{within}{MARKER_NAME}" in found or not is_alone:
            continue
        folder = target.folder if is_first else open_folder(f"{target.url}/{generation}")
        if claim.can_take_over() and _resume(journal, RemotePath(folder), target):
            claim.take_over()
            return save_id
    if is_first and (FIRST_LINE in found or marks.issuperset(found)):
        unfinished = find_unfinished(target)
        if unfinished is not None and not explain_unfinished_kept(unfinished, math.inf):
            remove_unfinished(unfinished)
    return ""


def _resume(journal: Journal, folder: Path, target: Path) -> bool:
    """Return whether the journal continues with a folder; log which."""
    if journal.resume(folder):
        logger.info("resuming the write of %s: %d bytes are written already", target, journal.nbytes)
        return True
    logger.warning(
        "writing %s starts anew: an interrupted run has left files from another source or other options", target
    )
    return False
