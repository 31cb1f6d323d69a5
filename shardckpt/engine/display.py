"""Show the progress of long operations, from ``shardckpt_event``: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardckpt.engine.amounts import format_bytes, format_seconds
from shardckpt.plugins.hookspecs import hookimpl
from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shardckpt.plugins.hookspecs import Event

#: Seconds between two lines; a verb that takes less shows none.
_PAUSE = 10.0


@contextmanager
def show_progress(operation: str, title: str = "", *, part: str = "") -> Iterator[None]:
    """Show on standard error how many bytes of an operation are done, its rate and the time left, in the block.

    A bar needs a terminal and ``rich`` (``pip install 'shardckpt[cli]'``), which also honours ``NO_COLOR``. The
    operation has the name of its events, and by default that is its title. ``part`` is another that may be a part of
    it: of a conversion, the search for damage, which is a ``verify``.
    """
    observer = _Observer(operation, part)
    plugins = get_plugin_manager()
    with _make_bar(title or operation) as draw:
        observer.draw = draw
        plugins.register(observer, f"progress of {operation}")
        try:
            yield
        finally:
            plugins.unregister(observer)


class _Observer:
    """Adds up the progress of an operation over the checkpoints that it works on at a time."""

    #: So that operations report it.
    wants_progress = True

    def __init__(self, *operations: str) -> None:
        self.operations = operations
        self.draw: Callable[[int, int], None] = _draw_nothing
        self._progress: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()

    @hookimpl
    def shardckpt_event(self, event: Event) -> None:
        if event.operation not in self.operations or event.phase or event.state == "start":
            return
        with self._lock:
            if event.state != "progress":  # the next save has bytes of its own
                self._progress.pop(event.directory, None)
                return
            self._progress[event.directory] = (event.nbytes, event.total)
            self.draw(*map(sum, zip(*self._progress.values(), strict=True)))


@contextmanager
def _make_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function that shows the number of bytes that are done and the total number of bytes."""
    columns: Any = None
    if sys.stderr.isatty():
        try:
            import rich.console
            import rich.progress as columns
        except ImportError:  # lines will do
            columns = None
    if columns is None:
        yield _Lines(title)
        return
    bar = columns.Progress(
        columns.TextColumn(title),
        columns.BarColumn(),
        columns.DownloadColumn(),
        columns.TransferSpeedColumn(),
        columns.TimeRemainingColumn(),
        console=rich.console.Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _draw_nothing(_done: int, _total: int) -> None:
    """Draw nothing."""


class _Lines:
    """Prints a line at most every few seconds."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._started = self._shown = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._shown < _PAUSE:
            return
        self._shown = now
        rate = done / (now - self._started)
        left = f", {format_seconds((total - done) / rate)} left" if rate else ""
        said = f"{self._title}: {format_bytes(done)} of {format_bytes(total)}, {format_bytes(rate)}/s{left}"
        sys.stderr.write(f"{said}\n")
        sys.stderr.flush()
