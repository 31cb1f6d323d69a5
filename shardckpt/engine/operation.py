"""One save or load as a sequence of steps, each reported to ``shardckpt_event``; an error in one ends it everywhere."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.engine.gc_pause import held_back
from shardckpt.plugins import Event

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pluggy import HookCaller

    from shardckpt.distributed import Comm
    from shardckpt.plugins import PluginHost


logger = logging.getLogger(__name__)


class Operation:
    """A save, load or migration under way on this rank.

    Args:
        kind: ``save``, ``load``, ``migrate`` or ``remove``.
        directory: The checkpoint.
        comm: The ranks that take part.
        host: The plugins that hear of it.
    """

    def __init__(self, kind: str, directory: Path, comm: Comm, host: PluginHost) -> None:
        self.comm = comm
        self.directory = directory
        self.host = host
        self._known: dict[str, Any] = {"operation": kind, "directory": str(directory), "rank": comm.rank}
        self._started = 0.0

    def dispatched(self, strategy: Any) -> None:
        """Note which strategy does the work."""
        kind = type(strategy)
        name = f"({strategy.backend!r}, {strategy.version}) {kind.__module__}.{kind.__qualname__}"
        self._known["strategy"] = name

    def wrote(self, nbytes: int) -> None:
        """Note how many bytes this rank wrote."""
        self._known["nbytes"] = nbytes

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
            with held_back(), self.comm.local_phase(self._known["operation"]):
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
            with held_back(), self.comm.local_phase(name):
                yield
        except Exception as exc:
            self._emit(phase=name, state="failure", seconds=time.perf_counter() - start, error=str(exc))
            raise
        self._emit(phase=name, state="end", seconds=time.perf_counter() - start)

    @cached_property
    def _hook(self) -> HookCaller:
        """Calls those who watch, whoever they are by then."""
        return self.host.hook.shardckpt_event

    def _emit(self, **changes: Any) -> None:
        try:
            if self._hook.get_hookimpls():
                self._hook(event=Event(**self._known | changes))
        except Exception:  # who watches a save must not be able to end it on one rank
            logger.warning("a plugin's shardckpt_event failed", exc_info=True)


__all__ = ["Operation"]
