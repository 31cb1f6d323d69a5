"""Preemption: after a signal or a request, the next call of ``save`` saves its step, and the training can end."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.manager.part import ManagerPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

#: Seconds after the first signal in which further ones do nothing. Schedulers and torchrun signal a process several
#: times within some ms, and kill it (SIGKILL) 30 s after; who signals it later wants it to end.
GRACE_SECONDS = 30.0


class Preemption(ManagerPart):
    """Handles signals, SIGTERM by default, until the step is committed that is saved because of one.

    A scheduler that ends a job (scancel, preemption) may signal all its processes, torchrun among them, which then
    signals its ranks once more. So a further signal changes nothing, until one of these: the step is committed, the
    part is closed, or :data:`GRACE_SECONDS` have passed since the first. Then it goes to the handler that was installed
    before, which ends the process by default.

    If a process has several of these, all handle the first signal that they share, and none lets a further one through
    while another waits for its step. With signals, it is an error not to make it in the main thread: Python installs
    signal handlers only there. With no signals, only :meth:`request` makes a step be saved.
    """

    def __init__(
        self, process_group: ProcessGroup | None = None, signals: Iterable[signal.Signals] = (signal.SIGTERM,)
    ) -> None:
        signals = tuple(signals)
        if signals and threading.current_thread() is not threading.main_thread():
            raise CheckpointingException(
                "save_on_sigterm, save_on_signals: make the CheckpointManager in the main thread"
            )
        self.received = False  # set by the handler: a collective there could interrupt another one
        self.grace_ends = 0.0  # by the monotonic clock, when further signals count
        self._group = process_group
        self._process = os.getpid()
        self._requested = False  # by the process itself; a signal that comes after that is the first one still
        self._is_agreed = False  # by all ranks: some rank got a signal or a request
        self._step: int | None = None  # the first that is saved after that
        self._closed = False
        # the earlier handlers by signal: read before ours are installed, since a signal may come as soon as one is
        self.earlier: dict[int, Any] = {number: signal.getsignal(number) for number in signals}
        for number in signals:
            signal.signal(number, self._handle)

    def request(self) -> None:
        """Let the next save save its step, as a signal does."""
        self._requested = True

    def is_preempted(self) -> bool:
        """Collective: return whether any rank got a signal or a request."""
        self._is_agreed = bool(Comm(self._group).largest(self.received or self._requested)[0])
        return self._is_agreed

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:  # noqa: ARG002 - every part has it
        """Note the step that is saved because of a signal or a request."""
        if self._is_agreed and self._step is None:
            self._step = step

    def after_commit(self, step: int) -> None:
        """Restore the handlers that were installed before, on all ranks, once that step is durable, or a later one."""
        if self._step is not None and step >= self._step:
            self.close()

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - every part has it
        """Restore the handlers that were installed before, unless another library has replaced one since."""
        # That library may call this handler, or restore it later: it then passes the signal on. So it does where it
        # must stay: outside of the main thread Python installs none.
        self._closed = True
        if threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in self.earlier.items():
            if earlier is not None and signal.getsignal(number) == self._handle:
                signal.signal(number, earlier)

    def _handle(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        chain = self._list_chain(number)
        waiting = [each for each in chain if each.is_waiting(now)]
        if not waiting:
            chain[-1].pass_on(number, frame)
            return
        for each in waiting:
            if not each.received:
                each.received, each.grace_ends = True, now + GRACE_SECONDS
        # By a thread: the signal may have interrupted a write to stderr or a logging handler, which cannot be entered
        # twice: a warning from here would fail in the training, or never return.
        text = (
            "%s: the next call of save saves its step; CheckpointManager.preempted is then True. Until then, and "
            "for %.0f s at most, a further signal does nothing"
        )
        left = max(each.grace_ends for each in waiting) - now
        with suppress(RuntimeError, MemoryError):  # no thread can start: the step is saved without the warning
            # not threading.Thread, which takes a lock that the interrupted code may hold
            _thread.start_new_thread(logger.warning, (text, signal.Signals(number).name, left))

    def _list_chain(self, number: int) -> list[Preemption]:
        """Return this one, and then the earlier ones that were installed for a signal, newest first."""
        chain = [self]
        while isinstance(owner := getattr(chain[-1].earlier.get(number), "__self__", None), Preemption):
            chain.append(owner)
        return chain

    def is_waiting(self, now: float) -> bool:
        """Return whether a signal is taken, and not passed on: the first, and more of them before the commit.

        A fork of the process saves nothing: whoever signals it wants it to end.
        """
        is_open = not self._closed and os.getpid() == self._process
        return is_open and (not self.received or now < self.grace_ends)

    def pass_on(self, number: int, frame: Any) -> None:
        """Run the handler that was installed before."""
        earlier = self.earlier.get(number)
        if callable(earlier):
            earlier(number, frame)
        elif earlier == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
