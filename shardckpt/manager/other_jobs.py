"""Tells two jobs that save to one folder of each other, before the second loads checkpoints of the first.

A manager that has saved there writes a small file next to the leases, which says who it is, and writes it anew about
once a minute of saving. One whose process is dead counts as none; whether a process of another host lives shows only
when its file is written anew.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

from shardckpt.commit.holds import describe_process, make_hold
from shardckpt.commit.owner import Owner
from shardckpt.engine.operation import report_event
from shardckpt.errors import OtherJobError, StorageError, escape_text, listed
from shardckpt.manager.part import ManagerPart
from shardckpt.storage.abilities import takes_requests
from shardckpt.storage.remote import limit_attempts

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from shardckpt.commit.holds import Hold
    from shardckpt.manager.steps import StepFolder

logger = logging.getLogger(__name__)

#: Seconds after which the file of another host's job counts for nothing. A job may save that seldom.
_SECONDS = 86400.0
#: Seconds between two looks at a store, and between two writes: a save every few seconds must not cost requests.
_INTERVAL = 60.0


class OtherJobs(ManagerPart):
    """Warns once of each other job that saves to the folder, or refuses to; a part of the main rank alone."""

    def __init__(self, folder: StepFolder, *, refuses: bool = False) -> None:
        self._folder, self._refuses = folder, refuses
        self._name, _ = make_hold("folder", "job", describe_process(), _SECONDS)
        self._looked_at = self._written_at = -_INTERVAL
        self._is_written = False
        #: Until when the file of each other job counted when it was last seen.
        self._seen: dict[str, float | None] = {}
        self._warned: set[str] = set()
        #: The steps that were there at the last save, and its own; None before the first.
        self._known: set[int] | None = None

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:  # noqa: ARG002 - every part has it
        """Look for other jobs; see :meth:`look`."""
        self.look()

    def look(self) -> None:
        """Look for other jobs' files; warn of jobs with a living process, or with a newer file than before.

        If this job is to save to no folder of another, that is an OtherJobError instead.
        """
        if time.monotonic() - self._looked_at < _INTERVAL and takes_requests(self._folder.place):
            return
        self._looked_at = time.monotonic()
        for name, job in self._folder.holds.find_jobs().items():
            before, owner = self._seen.setdefault(name, job.until), Owner.from_text(job.owner)
            if not job.is_current:
                self._drop(name)
            elif owner != Owner.current() and (owner.is_alive() or job.until != before):
                self._report(name, job)
                self._seen[name] = job.until  # not of a job that forbids a save: it is refused again

    def warn_of_unknown_steps(self, step: int, existing: Collection[int]) -> None:
        """Warn of steps that another job has saved since the last save, though it may have ended, and left no file.

        ``step`` is the step that is saved now, ``existing`` are the existing steps.
        """
        unknown = [] if self._known is None else sorted({*existing} - self._known)
        self._known = {*existing, step}
        if unknown:
            report_event("save", "other_job", self._folder, 0)
            logger.warning(
                "%s has steps that were not there at the last save of this job, and that it has not saved: %s. Another "
                "job saves there, or has: give each job a folder of its own",
                self._folder,
                listed([*map(str, unknown)]),
            )

    def after_commit(self, step: int) -> None:  # noqa: ARG002 - every part has it
        """Say that this job saves there."""
        if time.monotonic() - self._written_at < _INTERVAL:
            return
        self._written_at = time.monotonic()
        try:
            self._folder.holds.put(self._name, make_hold("folder", "job", describe_process(), _SECONDS)[1])
            self._is_written = True
        except StorageError as exc:  # the step is saved
            logger.warning("other jobs will not see that this one saves to %s: %s", self._folder, exc)

    def close(self, error: BaseException | None = None) -> None:
        """Remove the file, where that keeps no program waiting: it counts for nothing once the process has ended."""
        is_down = isinstance(error, StorageError) and takes_requests(self._folder.place)
        if self._is_written and not is_down:
            with limit_attempts(0):
                self._drop(self._name)

    def _report(self, name: str, job: Hold) -> None:
        """Report a job each time that it is seen, and warn of it once; or raise, if this one is not to save then."""
        last = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime((job.until or _SECONDS) - _SECONDS))
        text = (
            f"another job saves to {self._folder}, too: {escape_text(job.holder)}, last seen at {last}. Each takes the "
            "other's steps for its own: it replaces, loads and removes them. Give each job a folder of its own, or end "
            "one of them"
        )
        report_event("save", "other_job", self._folder, 0)
        if self._refuses:
            self._looked_at = -math.inf  # the next save looks again
            raise OtherJobError(f"{text}: nothing was saved, as on_other_job='error' says")
        if name not in self._warned:  # each manager says it: the training of another is at stake
            self._warned.add(name)
            logger.warning("%s", text)

    def _drop(self, name: str) -> None:
        try:
            self._folder.holds.drop(name)
        except StorageError as exc:  # it counts for nothing, or soon: the next job removes it
            logger.warning("cannot remove the file of a job in %s: %s", self._folder, exc)
