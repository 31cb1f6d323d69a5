"""Says which phase an operation has been in for long: a save that hangs comes to no other line of the log.

One thread of the process looks at all phases in progress. It starts with the first, and ends when there is none.
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

#: Seconds after which a phase is first reported. A rank that waits for others does nothing, and says so earlier.
NOTICE_AFTER = 60.0
#: Seconds between two looks at the phases.
_ROUND = 1.0
#: Seconds since some moment; tests have simulated ones.
_clock = time.perf_counter


class WatchedOperation(Protocol):
    """What the report of a long phase says of its operation."""

    kind: str
    directory: Path
    comm: Comm

    @property
    def last_progress(self) -> float:
        """When bytes of it were last done, by ``time.perf_counter``; 0.0 if nothing watches them."""


class LongPhase:
    """A phase of an operation, from its start to :meth:`end`.

    Without a name it is that of the operation's Comm. In the ``background`` it goes on behind the thread that starts
    it.
    """

    __slots__ = ("_is_said", "_operation", "_since", "name", "started", "thread")

    def __init__(self, operation: WatchedOperation, name: str, *, background: bool = False) -> None:
        self.name = name
        #: When it began, by ``time.perf_counter``.
        self.started = _clock()
        #: The thread that is in it; None if it goes on in the background.
        self.thread = None if background else threading.get_ident()
        self._operation = operation
        self._since = self.started
        self._is_said = False
        _watch.add(self)

    def end(self) -> None:
        """Stop watching the phase; without effect if that was done."""
        _watch.remove(self, _clock())

    def restart(self, now: float) -> None:
        """Count from now on: until now another phase within this one, or another rank, is what took the time."""
        self._since = now

    def report_once(self, now: float) -> None:
        """Log a warning if the phase has become long, and no byte has been done meanwhile, once."""
        operation = self._operation
        name = self.name or operation.comm.phase or operation.kind
        quiet = now - max(self._since, operation.last_progress)
        if self._is_said or not is_news(f"{operation.kind} in {name}", quiet, NOTICE_AFTER):
            return
        self._is_said = True
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
        #: Reentrant: the garbage collector may run within, and end a save that was dropped.
        self._lock = threading.RLock()
        self._running: list[LongPhase] = []
        self._thread: threading.Thread | None = None

    def add(self, phase: LongPhase) -> None:
        """Watch a phase that has begun."""
        with self._lock:
            self._running.append(phase)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="shardckpt-watch", daemon=True)
                with suppress(RuntimeError):  # a program that ends, or a system at its limit, starts no thread
                    thread.start()
                    self._thread = thread

    def remove(self, phase: LongPhase, now: float) -> None:
        """Stop watching a phase; the one around it counts from now on."""
        with self._lock, suppress(ValueError):  # a fork's child has none of its parent's
            self._running.remove(phase)
            around = [other for other in self._running if other.thread is not None and other.thread == phase.thread]
            if around:
                around[-1].restart(now)

    def report(self, now: float) -> None:
        """Log a warning for each phase that has become long: the innermost of each thread."""
        with self._lock:
            running = {phase.thread or id(phase): phase for phase in self._running}
        for phase in running.values():
            if phase.thread is not None and is_waiting(phase.thread):
                phase.restart(now)  # the wait for other ranks is reported there
            else:
                phase.report_once(now)

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(_ROUND)
            with suppress(Exception):  # of a logging handler: the thread must go on
                self.report(_clock())
            with self._lock:
                if not self._running:
                    self._thread = None
                    return


_watch = _Watch()


def _watch_anew() -> None:
    """Forget what the parent does, in a fork's child: it is without the threads that do it."""
    global _watch  # noqa: PLW0603 - the child's own, with a lock that no thread of the parent holds
    _watch = _Watch()


os.register_at_fork(after_in_child=_watch_anew)
