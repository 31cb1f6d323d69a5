"""Preemption: after a SIGTERM the next step is saved, and the training can end."""

from __future__ import annotations

import logging
import signal
import threading
from typing import TYPE_CHECKING, Any

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.manager.part import ManagerPart

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)


class Preemption(ManagerPart):
    """Takes the first SIGTERM; a second one does what one did before.

    Several of a process all take the first. Made in the main thread, which is where Python takes signals.

    Args:
        process_group: The ranks.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointingException("save_on_sigterm: make the CheckpointManager in the main thread")
        self.received = False
        self._group = process_group
        self._closed = False
        self._before: Any = signal.signal(signal.SIGTERM, self._take)

    def is_preempted(self) -> bool:
        """Collective: whether any rank has had a SIGTERM."""
        return bool(Comm(self._group).largest(self.received)[0])

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - as every part's
        """Take no further SIGTERM; where a later handler stands before this one, and gives back, pass it on."""
        self._closed = True
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)

    def _take(self, number: int, frame: Any) -> None:
        if self._closed:
            self._pass_on(number, frame)
            return
        self.received = True
        logger.warning("SIGTERM: the next call of save saves, and ranks then see CheckpointManager.preempted")
        self.close()
        if isinstance(getattr(self._before, "__self__", None), Preemption):
            self._before(number, frame)

    def _pass_on(self, number: int, frame: Any) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


__all__ = ["Preemption"]
