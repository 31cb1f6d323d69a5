"""Python's cyclic garbage collector, held back while many objects are made that all stay."""

from __future__ import annotations

import gc
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


_holders = _Holders()


@contextmanager
def held_back() -> Iterator[None]:
    """Let the collector wait: it visits every living object again and again while plans of many items grow."""
    with _holders.lock:
        if not _holders.count:
            _holders.ran = gc.isenabled()
            gc.disable()
        _holders.count += 1
    try:
        yield
    finally:
        with _holders.lock:
            _holders.count -= 1
            if not _holders.count and _holders.ran:
                gc.enable()


__all__ = ["held_back"]
