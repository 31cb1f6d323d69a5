"""Log phases that take long: an operation that hangs logs nothing else.

One thread per process watches all phases in progress. It starts with the first phase and ends with the last.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from shardckpt.distributed.long_wait import is_news, is_waiting

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.distributed.comm import Comm

logger = logging.getLogger(__name__)

#: Seconds after which a phase is first reported. A wait for other ranks is reported earlier, by ``long_wait``.
NOTICE_AFTER = 60.0
#: Seconds between two looks at the phases.
_ROUND = 1.0
#: Replaced by a simulated clock in tests.
_clock = time.perf_counter


class WatchedOperation(Protocol):
    """The part of an operation that the report of a long phase needs."""

    kind: str
    directory: Path
    comm: Comm

    @property
    def last_progress(self) -> float:
        """When bytes were last read or written, by ``time.perf_counter``; 0.0 if progress is not tracked."""


class LongPhase:
    """A phase of an operation, from its start to :meth:`end`.

    Args:
        operation: The operation, for the report.
        name: The phase's name; ``""`` for the current phase of the operation's Comm.
        background: Whether it continues after the thread that starts it has left it.
    """

    __slots__ = ("_is_reported", "_operation", "_since", "name", "started", "thread")

    def __init__(self, operation: WatchedOperation, name: str, *, background: bool = False) -> None:
        self.name = name
        #: When it began, by ``time.perf_counter``.
        self.started = _clock()
        #: The thread that is in it; None if it continues in the background.
        self.thread = None if background else threading.get_ident()
        self._operation = operation
        self._since = self.started
        self._is_reported = False
        _watch.add(self)

    def end(self) -> None:
        """Stop watching the phase; a second call has no effect."""
        _watch.remove(self, _clock())

    def restart(self, now: float) -> None:
        """Restart the count: the time until now went to a phase within this one, or to a wait for other ranks."""
        self._since = now

    def report_once(self, now: float) -> None:
        """Log one warning if the phase has been long without a byte read or written."""
        operation = self._operation
        name = self.name or operation.comm.phase or operation.kind
        quiet = now - max(self._since, operation.last_progress)
        if self._is_reported or not is_news(f"{operation.kind} in {name}", quiet, NOTICE_AFTER):
            return
        self._is_reported = True
        logger.warning(
            "shardckpt: %s of %s has been in %r for %.0f s on rank %d, and has not ended. py-spy dump --subprocesses "
            "--pid %d shows what it is doing",
            operation.kind,
            operation.directory,
            name,
            now - self._since,
            operation.comm.rank,
            os.getpid(),
        )


class _Watch:
    """The phases of this process in progress, and the thread that looks at them."""

    def __init__(self) -> None:
        #: Reentrant: the garbage collector may run while it is held, and end a save that was dropped.
        self._lock = threading.RLock()
        self._running: list[LongPhase] = []
        self._thread: threading.Thread | None = None

    def add(self, phase: LongPhase) -> None:
        """Watch a phase that has begun."""
        with self._lock:
            self._running.append(phase)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="shardckpt-watch", daemon=True)
                with suppress(RuntimeError):  # no thread starts at the interpreter's exit, or at a system's limit
                    thread.start()
                    self._thread = thread

    def remove(self, phase: LongPhase, now: float) -> None:
        """Stop watching a phase; the phase around it, in the same thread, counts from now on."""
        with self._lock, suppress(ValueError):  # the child of a fork does not have its parent's phases
            self._running.remove(phase)
            outer = [other for other in self._running if other.thread is not None and other.thread == phase.thread]
            if outer:
                outer[-1].restart(now)

    def report(self, now: float) -> None:
        """Log a warning for each innermost phase of a thread, and each background phase, that has become long."""
        with self._lock:
            # in the order of their starts: the innermost phase of a thread replaces those around it
            innermost = {phase.thread or id(phase): phase for phase in self._running}
        for phase in innermost.values():
            if phase.thread is not None and is_waiting(phase.thread):
                phase.restart(now)  # long_wait reports a wait for other ranks
            else:
                phase.report_once(now)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_ROUND)
            with suppress(Exception):  # a logging handler may fail: the thread must go on
                self.report(_clock())
            with self._lock:
                if not self._running:
                    self._thread = None
                    return


_watch = _Watch()


def _reset_after_fork() -> None:
    """Forget the parent's phases in the child of a fork, which does not have the parent's threads."""
    global _watch  # noqa: PLW0603 - a new one, since a thread of the parent may have held the old one's lock
    _watch = _Watch()


os.register_at_fork(after_in_child=_reset_after_fork)
