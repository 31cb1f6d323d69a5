"""An operation, such as a save or load: its phases are reported to ``shardckpt_event``, its errors to all ranks."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.engine.gc_pause import pause_gc
from shardckpt.engine.progress import Progress, wants_progress
from shardckpt.plugins import Event, describe_origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from shardckpt.distributed import Comm
    from shardckpt.plugins import PluginManager


logger = logging.getLogger(__name__)


class Operation:
    """A save, load, migration, removal or export in progress on this rank.

    Args:
        kind: ``save``, ``load``, ``migrate``, ``convert``, ``remove`` or ``export``.
        directory: The checkpoint.
        comm: The ranks that take part.
        plugins: The plugin manager, whose plugins observe the operation.
    """

    def __init__(self, kind: str, directory: Path, comm: Comm, plugins: PluginManager) -> None:
        self.comm = comm
        self.directory = directory
        self.plugins = plugins
        self.kind = kind
        #: When it began on this rank, by ``time.perf_counter``.
        self.created = time.perf_counter()
        self._fields: dict[str, Any] = {"operation": kind, "directory": str(directory), "rank": comm.rank}
        self._started = 0.0
        self._progress: Progress | None = None
        self.attribute_to(None)

    def set_strategy(self, strategy: Any) -> None:
        """Set the strategy that does the work, for later events."""
        kind = type(strategy)
        name = f"({strategy.backend!r}, {strategy.version}) {kind.__module__}.{kind.__qualname__}"
        self._fields["strategy"] = name
        self.attribute_to(strategy)

    def attribute_to(self, code: Any) -> None:
        """Let errors that a plugin raises in a phase name it; ``code`` is what will be called, for its class."""
        self.comm.describe_origin = partial(describe_origin, plugins=self.plugins, code=code)

    @property
    def strategy(self) -> str:
        """The strategy, as events and errors name it; ``""`` before :meth:`set_strategy`."""
        return str(self._fields.get("strategy", ""))

    def set_nbytes(self, nbytes: int) -> None:
        """Set the number of bytes that this rank wrote, for later events."""
        self._fields["nbytes"] = nbytes

    def start_progress(self, find_total: Callable[[], int]) -> None:
        """Report the bytes that :attr:`count` gets from now on, if a plugin asks for that.

        Args:
            find_total: Returns the bytes that this rank is to read or write.
        """
        if wants_progress(self.plugins):
            self._progress = Progress(
                self._fields["operation"], self.directory, find_total(), self.plugins, self.comm.rank
            )

    @property
    def count(self) -> Callable[[int], None] | None:
        """Counts some more bytes as done, from any thread; None if nobody asks."""
        return None if self._progress is None else self._progress.add

    def share_progress(self, other: Operation) -> None:
        """Count what another operation does, for this one: a conversion's loads."""
        other._progress = self._progress

    @contextmanager
    def collective_span(self) -> Iterator[None]:
        """Collective: report the operation from start to end; at its end all ranks go on, or all raise the same error.

        For an operation that ends where it begins. One that ends later, as a background save does, uses
        :meth:`open_span` and :meth:`close_span`.
        """
        with self.open_span():
            yield
            self.comm.sync_errors()
        self.close_span()

    @contextmanager
    def open_span(self) -> Iterator[None]:
        """Report the start of the operation, and a failure in this block; :meth:`close_span` reports its end later.

        Errors reach the other ranks as from :meth:`Comm.local_phase`.
        """
        with self._reported("", self._fields["operation"]) as self._started:
            yield

    def close_span(self, error: BaseException | None = None) -> None:
        """Report the end of an operation that :meth:`open_span` has started, or its failure."""
        self._emit_end("", self._started, error)

    @contextmanager
    def local_phase(self, name: str) -> Iterator[None]:
        """Do and report this rank's part of a phase; the next collective raises its error on all ranks.

        It is :meth:`Comm.local_phase` with events; the rules are the same.

        Args:
            name: What the phase does, for the events and the error.
        """
        with self._reported(name, name) as started:
            yield
        self._emit_end(name, started)

    @contextmanager
    def _reported(self, phase: str, name: str) -> Iterator[float]:
        """Report the start and a failure of a phase (``""``: of the operation), not its end; yield when it started."""
        started = time.perf_counter()
        self._emit(phase=phase, state="start", nbytes=0)
        try:
            with pause_gc(), self.comm.local_phase(name):
                yield started
        except Exception as exc:
            self._emit_end(phase, started, exc)
            raise

    def _emit_end(self, phase: str, started: float, error: BaseException | None = None) -> None:
        state, text = ("end", "") if error is None else ("failure", str(error))
        self._emit(phase=phase, state=state, seconds=time.perf_counter() - started, error=text)

    def _emit(self, **changes: Any) -> None:
        try:
            hook = self.plugins.hook.shardckpt_event
            if hook.get_hookimpls():
                hook(event=Event(**self._fields | changes))
        except Exception:  # an observer must not be able to fail a save, least of all on one rank
            logger.warning("a plugin's shardckpt_event failed", exc_info=True)
