"""Preemption: after a SIGTERM, the next call of ``save`` saves its step, and the training can end."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.manager.part import ManagerPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

#: Seconds after the first SIGTERM in which further ones do nothing. Schedulers and torchrun signal a process several
#: times within some ms, and kill it (SIGKILL) 30 s after; who signals it later wants it to end.
GRACE_SECONDS = 30.0


class Preemption(ManagerPart):
    """Handles SIGTERM until the step is committed that is saved because of it.

    A scheduler that ends a job (scancel, preemption) may signal all its processes, torchrun among them, which then
    signals its ranks once more. So a further SIGTERM changes nothing, until one of these: the step is committed, the
    part is closed, or :data:`GRACE_SECONDS` have passed since the first. Then it goes to the handler that was installed
    before, which ends the process by default. SIGINT (Ctrl-C) is not handled.

    If a process has several of these, all handle the first SIGTERM, and none lets a further one through while another
    waits for its step. Make it in the main thread: Python installs signal handlers only there.

    Args:
        process_group: The ranks.

    Raises:
        CheckpointingException: this is not the main thread.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointingException("save_on_sigterm: make the CheckpointManager in the main thread")
        self.received = False  # set by the handler: a collective there could interrupt another one
        self.until = 0.0  # by the monotonic clock, when further signals count
        self._group = process_group
        self._is_known = False  # to all ranks
        self._step: int | None = None  # the one that is saved because of the signal
        self._closed = False
        self.before: Any = signal.getsignal(signal.SIGTERM)  # a signal may come as soon as the handler is there
        signal.signal(signal.SIGTERM, self._take)

    def is_preempted(self) -> bool:
        """Collective: return whether any rank got a SIGTERM."""
        self._is_known = bool(Comm(self._group).largest(self.received)[0])
        return self._is_known

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:  # noqa: ARG002 - every part has it
        """Note the step that is saved because of the signal."""
        if self._is_known and self._step is None:
            self._step = step

    def after_commit(self, step: int) -> None:
        """Restore the handler that was installed before, on all ranks, once that step is durable, or a later one."""
        if self._step is not None and step >= self._step:
            self.close()

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - every part has it
        """Restore the handler that was installed before, unless another library has replaced this one since."""
        # That library may call this handler, or restore it later: it then passes the signal on. So it does where it
        # must stay: outside of the main thread Python installs none.
        self._closed = True
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self.before is not None and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self.before)

    def _take(self, number: int, frame: Any) -> None:
        now = time.monotonic()
        waiting = [each for each in self._chain() if each.is_waiting(now)]
        if not waiting:
            [*_, last] = self._chain()
            last.pass_on(number, frame)
            return
        for each in waiting:
            if not each.received:
                each.received, each.until = True, now + GRACE_SECONDS
        logger.warning(
            "SIGTERM: the next call of save saves its step; CheckpointManager.preempted is then True. Until then, and "
            "for %.0f s at most, a further SIGTERM does nothing",
            max(each.until for each in waiting) - now,
        )

    def _chain(self) -> Iterator[Preemption]:
        """Yield this one, and those that were installed before it, one after the other."""
        each: Any = self
        while isinstance(each, Preemption):
            yield each
            each = getattr(each.before, "__self__", None)

    def is_waiting(self, now: float) -> bool:
        """Return whether a signal is taken, and not passed on: the first, and more of them before the commit."""
        return not self._closed and (not self.received or now < self.until)

    def pass_on(self, number: int, frame: Any) -> None:
        """Do what the handler does that was installed before."""
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
