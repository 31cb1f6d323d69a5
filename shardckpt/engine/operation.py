"""An operation, such as a save or load: its phases are reported to ``shardckpt_event``, its errors to all ranks."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.engine.gc_pause import pause_gc
from shardckpt.plugins import Event

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pluggy import HookCaller

    from shardckpt.distributed import Comm
    from shardckpt.plugins import PluginManager


logger = logging.getLogger(__name__)


class Operation:
    """A save, load, migration, removal or export in progress on this rank.

    Args:
        kind: ``save``, ``load``, ``migrate``, ``remove`` or ``export``.
        directory: The checkpoint.
        comm: The ranks that take part.
        plugins: The plugin manager, whose plugins observe the operation.
    """

    def __init__(self, kind: str, directory: Path, comm: Comm, plugins: PluginManager) -> None:
        self.comm = comm
        self.directory = directory
        self.plugins = plugins
        self._fields: dict[str, Any] = {"operation": kind, "directory": str(directory), "rank": comm.rank}
        self._started = 0.0

    def dispatched(self, strategy: Any) -> None:
        """Set the strategy that does the work, for later events."""
        kind = type(strategy)
        name = f"({strategy.backend!r}, {strategy.version}) {kind.__module__}.{kind.__qualname__}"
        self._fields["strategy"] = name

    def wrote(self, nbytes: int) -> None:
        """Set the number of bytes that this rank wrote, for later events."""
        self._fields["nbytes"] = nbytes

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
        self._started = time.perf_counter()
        try:
            with pause_gc(), self.comm.local_phase(self._fields["operation"]):
                self._emit(phase="", state="start", nbytes=0)
                yield
        except Exception as exc:
            self.close_span(exc)
            raise

    def close_span(self, error: BaseException | None = None) -> None:
        """Report the end of an operation that :meth:`open_span` has started, or its failure."""
        state, text = ("end", "") if error is None else ("failure", str(error))
        self._emit(phase="", state=state, seconds=time.perf_counter() - self._started, error=text)

    @contextmanager
    def local_phase(self, name: str) -> Iterator[None]:
        """Do and report this rank's part of a phase; the next collective raises its error on all ranks.

        It is :meth:`Comm.local_phase` with events; the rules are the same.

        Args:
            name: What the phase does, for the events and the error.
        """
        start = time.perf_counter()
        self._emit(phase=name, state="start", nbytes=0)
        try:
            with pause_gc(), self.comm.local_phase(name):
                yield
        except Exception as exc:
            self._emit(phase=name, state="failure", seconds=time.perf_counter() - start, error=str(exc))
            raise
        self._emit(phase=name, state="end", seconds=time.perf_counter() - start)

    @cached_property
    def _hook(self) -> HookCaller:
        """The hook: it calls all plugins, also those that are registered later."""
        return self.plugins.hook.shardckpt_event

    def _emit(self, **changes: Any) -> None:
        try:
            if self._hook.get_hookimpls():
                self._hook(event=Event(**self._fields | changes))
        except Exception:  # an observer must not be able to fail a save, least of all on one rank
            logger.warning("a plugin's shardckpt_event failed", exc_info=True)


__all__ = ["Operation"]
