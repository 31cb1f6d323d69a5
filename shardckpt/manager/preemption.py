"""Preemption: after a SIGTERM, the next call of ``save`` saves its step, and the training can end."""

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
    """Handles the first SIGTERM. A second one goes to the handler that was installed before.

    If a process has several of these, all handle the first SIGTERM. Make it in the main thread: Python installs signal
    handlers only there.

    Args:
        process_group: The ranks.

    Raises:
        CheckpointingException: this is not the main thread.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointingException("save_on_sigterm: make the CheckpointManager in the main thread")
        self.received = False  # set by the handler: a collective there could interrupt another one
        self._group = process_group
        self._closed = False
        self._before: Any = signal.signal(signal.SIGTERM, self._take)

    def is_preempted(self) -> bool:
        """Collective: return whether any rank got a SIGTERM."""
        return bool(Comm(self._group).largest(self.received)[0])

    def close(self, error: BaseException | None = None) -> None:  # noqa: ARG002 - every part has it
        """Restore the handler that was installed before, unless another library has replaced this one since."""
        # That library may call this handler, or restore it later: it then passes the signal on.
        self._closed = True
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)

    def _take(self, number: int, frame: Any) -> None:
        if self._closed:
            self._pass_on(number, frame)
            return
        self.received = True
        logger.warning("SIGTERM: the next call of save saves its step; CheckpointManager.preempted is then True")
        self.close()
        # The handler before may be that of another manager, which has to save, too. Any other waits for a second
        # signal: the default one would end the process before the save.
        if isinstance(getattr(self._before, "__self__", None), Preemption):
            self._before(number, frame)

    def _pass_on(self, number: int, frame: Any) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
