"""Python's cyclic garbage collector, held back while many objects are made that all stay."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Holders:
    """How many hold the collector back at present, in any thread, and whether it ran before the first of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.ran = False

    def forget(self) -> None:
        """Let the collector run in a forked child: the threads that held it back are not there."""
        self.lock = threading.Lock()
        if self.count and self.ran:
            gc.enable()
        self.count = 0


_holders = _Holders()
os.register_at_fork(after_in_child=_holders.forget)


@contextmanager
def held_back() -> Iterator[None]:
    """Let the collector wait: it visits every living object again and again while plans of many items grow."""
    with _holders.lock:
        if not _holders.count:
            _holders.ran = gc.isenabled()
        _holders.count += 1
        if _holders.count == 1:
            gc.disable()
    try:
        yield
    finally:
        with _holders.lock:
            if _holders.count == 1 and _holders.ran:
                gc.enable()
            _holders.count = max(0, _holders.count - 1)  # 0 already in a child that was forked in here


__all__ = ["held_back"]
