"""The bytes of a long operation that are done, reported to ``shardckpt_event``."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from shardckpt.plugins.hookspecs import Event

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.plugins.manager import PluginManager

#: Seconds between two reports: an observer draws no faster, and the threads that count wait for it.
_INTERVAL = 0.1


class Progress:
    """Counts the bytes of an operation of this process; any number of threads may add some at a time.

    The operation is ``verify`` or another name that :class:`~shardckpt.plugins.Event` lists.
    """

    def __init__(
        self, operation: str, directory: str | Path, total: int, plugins: PluginManager, rank: int = 0
    ) -> None:
        self._start = Event(operation, "", "progress", str(directory), rank=rank, total=total)
        self._plugins = plugins
        self._total = total
        self._done = 0
        self._started = time.perf_counter()
        self._reported = 0.0
        #: When the last bytes were counted, by ``time.perf_counter``.
        self.last_added = self._started
        self._lock = threading.Lock()
        self.add(0)

    def add(self, nbytes: int) -> None:
        """Count some more bytes as done, and report it unless that was just done; the last bytes always are."""
        with self._lock:
            was_whole = bool(self._reported) and self._done == self._total
            # more is done than was forecast where headers are written, or the size of a new version is not known before
            self._done = min(self._done + nbytes, self._total)
            self.last_added = now = time.perf_counter()
            if was_whole or (now - self._reported < _INTERVAL and self._done < self._total):
                return
            self._reported = now
            self._plugins.report(replace(self._start, nbytes=self._done, seconds=now - self._started))

    def end(self) -> None:
        """Count the rest as done: files that did not have to be read whole."""
        self.add(max(0, self._total - self._done))


def wants_progress(plugins: PluginManager) -> bool:
    """Return whether a plugin that is registered asks for the progress of operations: it has ``wants_progress``.

    A save then calls it ten times a second from the threads that write; without this call it costs nothing.
    """
    return any(getattr(hook.plugin, "wants_progress", False) for hook in plugins.hook.shardckpt_event.get_hookimpls())
