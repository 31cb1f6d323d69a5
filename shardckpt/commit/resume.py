"""Take over the staging directory that a killed process has left, with its journal, to go on from there."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from shardckpt.commit.commit import discard_staging, list_staging_directories, staging_path
from shardckpt.commit.owner import claim_name, release_name
from shardckpt.commit.staging_names import STAGING, get_save_id, parse_temporary
from shardckpt.storage import JOURNAL_NAME, Journal, is_there

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(__name__)


def adopt_staging(target: Path, journal: Journal) -> Path | None:
    """Take over what a killed process was writing for a target, if the journal is of the same identity.

    Returns the staging directory, which this process owns now; None if there is none. Of a process that may be alive,
    nothing is taken. What does not belong to the same source and options is removed, after a warning.
    """
    for path in list_staging_directories(target):
        found = parse_temporary(path)
        if found is None or found.is_garbage or found.kind != STAGING or not is_there(path / JOURNAL_NAME):
            continue
        if found.owner is None or found.owner.is_alive() is not False:
            continue
        mine = staging_path(target, get_save_id(path))
        claim_name(mine.name)  # before the rename: garbage collection in another thread removes what is not claimed
        try:
            os.rename(path, mine)
        except OSError:  # another process was first
            release_name(mine.name)
            continue
        if journal.resume(mine):
            logger.info("going on with %s, of which %d bytes are written", target, journal.nbytes)
            return mine
        logger.warning(
            "writing %s starts anew: what an interrupted run has left is of another source or of other options", target
        )
        discard_staging(mine)
    return None
