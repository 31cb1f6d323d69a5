"""What a thread logs, for tests whose ranks are threads."""

from __future__ import annotations

import logging
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def collect_warnings(
    name: str = "shardckpt", level: int = logging.WARNING, *, all_threads: bool = False
) -> Iterator[list[str]]:
    """Yield the messages of a logger that come from this rank: from the thread that begins the block, or all."""
    said: list[str] = []
    handler, thread = logging.Handler(level), threading.get_ident()
    handler.addFilter(lambda record: all_threads or record.thread == thread)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
