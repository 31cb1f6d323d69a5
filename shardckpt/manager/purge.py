"""Removing the checkpoints that a policy does not keep: behind the training, and so that it can die at any moment."""

from __future__ import annotations

import functools
import logging
import queue
import threading
from typing import TYPE_CHECKING, TypeAlias

from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage.commit import is_staging_for
from shardckpt.storage.filesystem import naming
from shardckpt.storage.remote import ListsFolders, RemotePath
from shardckpt.storage.removal import clear_tombstones, delete_checkpoint, is_half_deleted, retire

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable
    from pathlib import Path

    from shardckpt.manager.retention import Retention
    from shardckpt.manager.steps import StepFolder
    from shardckpt.storage.remote import RemoteFolder

logger = logging.getLogger(__name__)

#: Seconds that ``close`` waits for removals before it leaves the rest to the next purge.
CLOSE_TIMEOUT = 600.0

#: What lies in a staging directory: names, sizes, and times of the last write.
_Look: TypeAlias = "list[tuple[str, int, int]]"


def purge(folder: StepFolder, retention: Retention, protected: Collection[int] = ()) -> list[int]:
    """Remove the checkpoints that the policy does not keep, as the folder has them now.

    Only what is committed, whole and readable counts, and only that is removed; no link to a directory elsewhere.
    What cannot be removed is said in a warning, and removed by the next purge that can.

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
    if not isinstance(folder.place, RemotePath) and folder.place.is_dir():
        clear_tombstones(folder.place, functools.partial(_is_owned, folder))
    return gone


class Purger:
    """Purges in a thread of its own; one process has one for a folder.

    The staging directories of saves that were killed before this began are removed by its first purge, if nothing has
    been written to them in between.

    Args:
        folder: Where the checkpoints are.
        retention: What is kept.
    """

    def __init__(self, folder: StepFolder, retention: Retention) -> None:
        self._folder = folder
        self._retention = retention
        self._left = _staging(folder)
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
            if self._left:
                _retire_dead(self._left, _staging(self._folder))
                self._left = {}
            purge(self._folder, self._retention, protected)
        except Exception:  # whatever it is, the training goes on, and the next purge tries again
            logger.warning("cannot remove old checkpoints from %s", self._folder, exc_info=True)


def _is_link(folder: StepFolder, step: int) -> bool:
    """Whether a step's directory is a link to another place."""
    path = folder.place / folder.names.name(step)
    return not isinstance(path, RemotePath) and path.is_symlink()


def _is_removed(folder: StepFolder, step: int) -> bool:
    """Make a checkpoint one no more, if that can be done."""
    try:
        if isinstance(folder.place, RemotePath):
            _delete(folder, folder.place.folder, step)
        else:
            retire(folder.place / folder.names.name(step))
    except StorageError as exc:
        logger.warning("step %d in %s is to be removed, and stays for now: %s", step, folder, exc)
        return False
    logger.info("removed step %d from %s", step, folder)
    return True


def _delete(folder: StepFolder, parent: RemoteFolder, step: int) -> None:
    path = folder.path(step)
    if isinstance(path, RemotePath):
        delete_checkpoint(path.folder)
    if isinstance(parent, ListsFolders):
        parent.remove_folder(folder.names.name(step))


def _is_owned(folder: StepFolder, name: str) -> bool:
    """Whether a name is a step's, or that of a staging directory of one."""
    return folder.names.parse(name) is not None or _staged_step(folder, name) is not None


def _staged_step(folder: StepFolder, name: str) -> int | None:
    """The step whose save has, or had, a staging directory of that name."""
    step = folder.names.parse(name[1:].partition(".")[0])
    return step if step is not None and is_staging_for(name, folder.names.name(step)) else None


def _staging(folder: StepFolder) -> dict[Path, _Look]:
    """The staging directories of saves, and what is in each."""
    place = folder.place
    if isinstance(place, RemotePath) or not place.is_dir():
        return {}
    with naming("list", place):
        found = [path for path in place.iterdir() if _staged_step(folder, path.name) is not None]
    return {path: _look(path) for path in found if path.is_dir() and not path.is_symlink()}


def _look(directory: Path) -> _Look:
    look = []
    for path in [directory, *directory.rglob("*")]:
        try:
            status = path.lstat()
        except OSError:  # gone meanwhile: its save is alive, or another process cleans up
            continue
        look.append((str(path), status.st_size, status.st_mtime_ns))
    return sorted(look)


def _retire_dead(before: dict[Path, _Look], now: dict[Path, _Look]) -> None:
    """Retire the staging directories in which nothing has changed."""
    for path in before.keys() & now.keys():
        if before[path] == now[path]:
            logger.info("%s is of a save that was killed: it is removed", path)
            try:
                retire(path)
            except StorageError as exc:
                logger.warning("%s", exc)


__all__ = ["CLOSE_TIMEOUT", "Purger", "purge"]
