"""Pausing Python's cyclic garbage collector while many objects are made that all stay."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ContextDecorator


class _Pauses:
    """The number of pauses in progress, in any thread, and whether the collector was enabled before the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.was_enabled = False

    def reset(self) -> None:
        """End all pauses in a forked child: the threads that would end them do not exist there."""
        self.lock = threading.Lock()
        if self.count and self.was_enabled:
            gc.enable()
        self.count = 0


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.reset)


def pause_gc() -> _Pause:
    """Pause the garbage collector in a block or a function; pauses may nest, and overlap in several threads.

    While a plan of many items grows, the collector would visit all living objects again and again.
    """
    return _pause


class _Pause(ContextDecorator):
    """One pause more, as long as a block runs; all blocks share the object, since each phase of a load has one."""

    def __enter__(self) -> None:
        with _pauses.lock:
            if not _pauses.count:
                _pauses.was_enabled = gc.isenabled()
            _pauses.count += 1
            if _pauses.count == 1:
                gc.disable()

    def __exit__(self, *_: object) -> None:
        with _pauses.lock:
            if _pauses.count == 1 and _pauses.was_enabled:
                gc.enable()
            _pauses.count = max(0, _pauses.count - 1)  # 0 already in a child that was forked in the block


_pause = _Pause()
