"""Garbage collection: removes the checkpoints that no policy keeps, behind the training; it may die at any moment."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING

from shardckpt.engine import supersedes, why_kept_beside
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.manager.retention import steps_to_remove
from shardckpt.storage import (
    ListsFolders,
    can_rename,
    delete_checkpoint,
    find_leftovers,
    is_half_deleted,
    make_tombstone,
    on_store,
    remove_free,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from shardckpt.manager.retention import RetentionPolicy, StepMetrics
    from shardckpt.manager.steps import StepFolder
    from shardckpt.storage import RemoteFolder

logger = logging.getLogger(__name__)

#: Seconds that ``close`` waits for removals before it leaves the rest to the next collection.
CLOSE_TIMEOUT = 600.0


def collect_garbage(
    folder: StepFolder, policies: Collection[RetentionPolicy], protected: Collection[int] = ()
) -> list[int]:
    """Remove the checkpoints that no policy keeps, and what killed saves and removals have left.

    Args:
        folder: Where they are.
        policies: What is kept; without any, every checkpoint is.
        protected: Steps that are kept whatever the policies return.

    Returns:
        The steps that were removed.

    Raises:
        StorageError: the folder cannot be listed.
        CheckpointingException: a policy returned something else than steps; nothing is removed.
    """
    if not policies:  # a look at every checkpoint, which are many, would be for nothing
        _clear(folder)
        return []
    return remove_steps(folder, lambda checkpoints: steps_to_remove(policies, checkpoints, protected))


def remove_steps(folder: StepFolder, choose: Callable[[StepMetrics], Iterable[int]]) -> list[int]:
    """Remove the checkpoints that a function chooses, and what killed saves and removals have left.

    Only whole, readable checkpoints count, and only those are removed; no link to a directory elsewhere. Of killed
    saves nothing goes that a living process has. What cannot be removed is said in a warning, and stays for a later
    call.

    Args:
        folder: Where they are.
        choose: Returns the steps to remove, of those that it is given.

    Returns:
        The steps that were removed.

    Raises:
        StorageError: the folder cannot be listed.
    """
    found = [folder.look(step) for step in folder.steps()]
    own = {each.step: each.metrics for each in found if each.counts and not _is_link(folder, each.step)}
    gone = [step for step in choose(own) if _is_removed(folder, step)]
    for each in found:
        if each.error is not None and is_half_deleted(folder.path(each.step)):
            _is_removed(folder, each.step)
    _clear(folder)
    return gone


class GarbageCollector:
    """Collects garbage in a thread of its own; one process has one for a folder.

    Args:
        folder: Where the checkpoints are.
        policies: What is kept.
    """

    def __init__(self, folder: StepFolder, policies: Collection[RetentionPolicy]) -> None:
        self._folder = folder
        self._policies = policies
        self._orders: queue.Queue[Collection[int] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, protected: Iterable[int] = ()) -> None:
        """Have garbage collected, after a save is durable; returns at once.

        Args:
            protected: As for :func:`collect_garbage`.
        """
        if self._closed:
            raise CheckpointingException(f"the garbage collector of {self._folder} is closed")
        self._orders.put(frozenset(protected))
        if self._thread is None:
            # a daemon: whoever forgets to close is not kept from ending, and the next collection goes on
            self._thread = threading.Thread(target=self._run, name="shardckpt-gc", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until all that was submitted is done."""
        self._orders.join()

    def close(self, timeout: float = CLOSE_TIMEOUT) -> None:
        """Do what was submitted, and end the thread.

        Args:
            timeout: Seconds after which the rest is left to the next collection, with a warning.
        """
        closed, self._closed = self._closed, True
        if self._thread is None or closed:
            return
        self._orders.put(None)
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("removals in %s take longer than %s s: a later one will end them", self._folder, timeout)

    def _run(self) -> None:
        for protected in iter(self._orders.get, None):
            self._collect(protected)
            self._orders.task_done()
        self._orders.task_done()

    def _collect(self, protected: Collection[int]) -> None:
        try:
            collect_garbage(self._folder, self._policies, protected)
        except Exception:  # whatever it is, the training goes on, and the next collection tries again
            logger.warning("cannot remove old checkpoints from %s", self._folder, exc_info=True)


def _clear(folder: StepFolder) -> None:
    """Remove what removals and killed saves of steps have left; what a living process has, or may have, stays."""
    place = folder.place
    if not can_rename(place):
        return
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
            make_tombstone(folder.place / folder.names.name(step))
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


__all__ = ["CLOSE_TIMEOUT", "GarbageCollector", "collect_garbage", "remove_steps"]
