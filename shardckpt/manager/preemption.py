"""SIGTERM as a wish: the training ends at the next step, when its state is saved."""

from __future__ import annotations

import logging
import signal
import threading
from typing import Any

from shardckpt.errors import CheckpointingException

logger = logging.getLogger(__name__)


class Preemption:
    """Takes the first SIGTERM; a second one does what one did before.

    Made in the main thread, which is where Python takes signals.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise CheckpointingException("save_on_sigterm: make the CheckpointManager in the main thread")
        self.received = False
        self._before: Any = signal.signal(signal.SIGTERM, self._take)

    def close(self) -> None:
        """Take no further SIGTERM."""
        if self._before is not None and signal.getsignal(signal.SIGTERM) == self._take:
            signal.signal(signal.SIGTERM, self._before)
        self._before = None

    def _take(self, *_: Any) -> None:
        self.received = True
        logger.warning("SIGTERM: the next call of save saves, and ranks then see CheckpointManager.preempted")
        self.close()


__all__ = ["Preemption"]
