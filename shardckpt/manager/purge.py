"""Removing the checkpoints that a policy does not keep: behind the training, and so that it can die at any moment."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from shardckpt.engine import supersedes, why_kept_beside
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage import (
    ListsFolders,
    can_rename,
    delete_checkpoint,
    find_leftovers,
    is_half_deleted,
    on_store,
    remove_free,
    retire,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from shardckpt.manager.retention import Retention
    from shardckpt.manager.steps import StepFolder
    from shardckpt.storage import RemoteFolder

logger = logging.getLogger(__name__)

#: Seconds that ``close`` waits for removals before it leaves the rest to the next purge.
CLOSE_TIMEOUT = 600.0


def purge(folder: StepFolder, retention: Retention, protected: Collection[int] = ()) -> list[int]:
    """Remove the checkpoints that the policy does not keep, as the folder has them now.

    Only what is committed, whole and readable counts, and only that is removed; no link to a directory elsewhere.
    What killed saves and removals of steps have left goes too, if no living process has it. What cannot be removed is
    said in a warning, and removed by the next purge that can.

    Args:
        folder: Where they are.
        retention: What is kept.
        protected: Steps that stay whatever the policy says: the one just saved, one that is being loaded.

    Returns:
        The steps that are no checkpoints any more.

    Raises:
        StorageError: the folder cannot be listed.
    """
    found = [] if retention.keeps_all else [folder.look(step) for step in folder.steps()]
    own = [(each.step, each.metrics) for each in found if each.counts and not _is_link(folder, each.step)]
    gone = [step for step in retention.to_remove(own, protected) if _is_removed(folder, step)]
    for each in found:
        if each.error is not None and is_half_deleted(folder.path(each.step)):
            _is_removed(folder, each.step)
    if can_rename(folder.place):
        _clear(folder, folder.place)
    return gone


class Purger:
    """Purges in a thread of its own; one process has one for a folder.

    Args:
        folder: Where the checkpoints are.
        retention: What is kept.
    """

    def __init__(self, folder: StepFolder, retention: Retention) -> None:
        self._folder = folder
        self._retention = retention
        self._orders: queue.Queue[Collection[int] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, protected: Iterable[int] = ()) -> None:
        """Have the folder purged, after a save is durable; returns at once.

        Args:
            protected: As for :func:`purge`.
        """
        if self._closed:
            raise CheckpointingException(f"the purger of {self._folder} is closed")
        self._orders.put(frozenset(protected))
        if self._thread is None:
            # a daemon: whoever forgets to close is not kept from ending, and the next purge goes on
            self._thread = threading.Thread(target=self._run, name="shardckpt-purge", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all that was submitted is done."""
        self._orders.join()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Do what was submitted, and end the thread.

        Args:
            timeout: Seconds after which the rest is left to the next purge, with a warning.
        """
        closed, self._closed = self._closed, True
        if self._thread is None or closed:
            return
        self._orders.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("removals in %s take longer than %s s: a later purge will end them", self._folder, timeout)

    def _run(self) -> None:
        for protected in iter(self._orders.get, None):
            self._purge(protected)
            self._orders.task_done()
        self._orders.task_done()

    def _purge(self, protected: Collection[int]) -> None:
        try:
            purge(self._folder, self._retention, protected)
        except Exception:  # whatever it is, the training goes on, and the next purge tries again
            logger.warning("cannot remove old checkpoints from %s", self._folder, exc_info=True)


def _clear(folder: StepFolder, place: Path) -> None:
    """Remove what removals and killed saves of steps have left; what a living process has, or may have, stays."""
    leftovers = find_leftovers(place, lambda stem: _is_step(stem, folder))
    is_superseded = supersedes(folder.host)
    remove_free(leftovers, lambda leftover: why_kept_beside(leftover, place / leftover.stem, is_superseded))


def _is_step(stem: str, folder: StepFolder) -> bool:
    """Whether it is a step's; older releases gave staging directories, too, the names of removed checkpoints."""
    return folder.names.parse(stem.removeprefix(".").partition(".shardckpt-")[0]) is not None


def _is_link(folder: StepFolder, step: int) -> bool:
    """Whether a step's directory is a link to another place."""
    return (folder.place / folder.names.name(step)).is_symlink()


def _is_removed(folder: StepFolder, step: int) -> bool:
    """Make a checkpoint one no more, if that can be done."""
    try:
        remote = on_store(folder.place)
        if remote is None:
            retire(folder.place / folder.names.name(step))
        else:
            _delete(folder, remote.folder, step)
    except StorageError as exc:
        logger.warning("step %d in %s is to be removed, and stays for now: %s", step, folder, exc)
        return False
    logger.info("removed step %d from %s", step, folder)
    return True


def _delete(folder: StepFolder, parent: RemoteFolder, step: int) -> None:
    remote = on_store(folder.path(step))
    if remote is not None:
        delete_checkpoint(remote.folder)
    if isinstance(parent, ListsFolders):
        parent.remove_folder(folder.names.name(step))


__all__ = ["CLOSE_TIMEOUT", "Purger", "purge"]
