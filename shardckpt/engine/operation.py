"""An operation, such as a save or load: its phases are reported to ``shardckpt_event``, its errors to all ranks."""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from shardckpt.engine.amounts import format_bytes
from shardckpt.engine.gc_pause import pause_gc
from shardckpt.engine.long_phase import LongPhase
from shardckpt.engine.progress import Progress, wants_progress
from shardckpt.errors import CorruptCheckpointError, join_lines, list_causes
from shardckpt.plugins.hookspecs import Event
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.plugins.origin import describe_origin
from shardckpt.storage.store_errors import mask_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path
    from types import TracebackType

    from shardckpt.distributed.comm import Comm
    from shardckpt.plugins.manager import PluginManager


logger = logging.getLogger(__name__)

#: Numbers of the operations of this process.
_numbers = count(1)


class Operation:
    """A save, load, migration, removal or export in progress on this rank.

    Its kind is ``save``, ``load``, ``migrate``, ``convert``, ``remove`` or ``export``.
    """

    def __init__(self, kind: str, directory: Path, comm: Comm, plugins: PluginManager) -> None:
        self.comm = comm
        self.directory = directory
        self.plugins = plugins
        self.kind = kind
        #: When it began on this rank, by ``time.perf_counter``.
        self.created = time.perf_counter()
        self._fields: dict[str, Any] = {
            "operation": kind,
            "directory": str(directory),
            "rank": comm.rank,
            "number": next(_numbers),
        }
        self._started = 0.0
        #: Seconds that this operation has kept its caller waiting so far.
        self._blocked = 0.0
        self._progress: Progress | None = None
        self.attribute_to(None)

    def set_strategy(self, strategy: Any) -> None:
        """Set the strategy that does the work, for later events."""
        kind = type(strategy)
        name = f"({strategy.backend!r}, {strategy.version}) {kind.__module__}.{kind.__qualname__}"
        self._fields["strategy"] = name
        self.attribute_to(strategy)

    def attribute_to(self, code: Any) -> None:
        """Let errors that a plugin raises in a phase name it; the class of ``code``, the called object, shows which."""
        self.comm.describe_origin = partial(describe_origin, plugins=self.plugins, code=code)

    @property
    def strategy(self) -> str:
        """The strategy, as events and errors name it; ``""`` before :meth:`set_strategy`."""
        return str(self._fields.get("strategy", ""))

    def set_nbytes(self, nbytes: int) -> None:
        """Set the number of bytes that this rank wrote, for later events."""
        self._fields["nbytes"] = nbytes

    def add_nbytes(self, nbytes: int) -> None:
        """Count bytes that this rank has loaded, for later events."""
        self._fields["nbytes"] = self._fields.get("nbytes", 0) + nbytes

    def start_progress(self, find_total: Callable[[], int]) -> None:
        """Report the bytes that :attr:`count` gets from now on, if a plugin asks for that.

        Only then is ``find_total`` called, which returns the bytes that this rank is to read or write.
        """
        if wants_progress(self.plugins):
            self._progress = Progress(
                self._fields["operation"], self.directory, find_total(), self.plugins, self.comm.rank
            )

    @property
    def count(self) -> Callable[[int], None] | None:
        """Counts some more bytes as done, from any thread; None if nothing watches."""
        return None if self._progress is None else self._progress.add

    def share_progress(self, other: Operation) -> None:
        """Count the work of another operation for this one: a conversion's loads."""
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
        self._started = time.perf_counter()
        try:
            with self.blocking():
                self._report_start("")
                with pause_gc(), self.comm.local_phase(self.kind):
                    yield
        except BaseException as exc:  # of an interrupt, too: else it would count as in flight for ever
            self.close_span(exc)
            raise

    def close_span(self, error: BaseException | None = None) -> None:
        """Report the end of an operation that :meth:`open_span` has started, or its failure."""
        with self.blocking():
            self._report_end("", self._started, error, blocked=self._blocked)
        if error is None and self.comm.is_main and logger.isEnabledFor(logging.INFO):
            logger.info(
                "%s of %s: %s on this rank in %.2f s, of which the program waited %.2f s",
                self.kind,
                self.directory,
                format_bytes(self._fields.get("nbytes", 0)),
                time.perf_counter() - self._started,
                self._blocked,
            )

    @contextmanager
    def blocking(self, phase: str = "") -> Iterator[None]:
        """Count the block as time that the caller waits for; a background save has several such.

        ``phase`` names the work outside of all reported phases; ``""``: as the Comm names it.
        """
        started, watched = time.perf_counter(), LongPhase(self, phase)
        try:
            yield
        finally:
            watched.end()
            self._blocked += time.perf_counter() - started

    def local_phase(self, name: str) -> AbstractContextManager[None]:
        """Do and report this rank's part of a phase; the next collective raises its error on all ranks.

        It is :meth:`Comm.local_phase` with events; the rules are the same. The events and the error have the name.
        """
        return _Phase(self, name)

    def start_phase(self, name: str, *, background: bool = True) -> LongPhase:
        """Report the start of a phase; :meth:`end_phase` ends it.

        In the ``background`` it continues behind the thread that starts it, and may end in another.
        """
        self._report_start(name)
        return LongPhase(self, name, background=background)

    def end_phase(self, phase: LongPhase, error: BaseException | None = None, **fields: Any) -> None:
        """Report the end of a phase that :meth:`start_phase` has started, or its failure, with more fields of it."""
        phase.end()
        self._report_end(phase.name, phase.started, error, **fields)

    @property
    def last_progress(self) -> float:
        """When bytes of this operation were last done, by ``time.perf_counter``; 0.0 if nothing watches them."""
        return 0.0 if self._progress is None else self._progress.last_added

    def _report_start(self, phase: str) -> None:
        if self._is_observed():
            self._emit(phase=phase, state="start", nbytes=0)

    def _report_end(self, phase: str, started: float, error: BaseException | None, **fields: Any) -> None:
        """Report the end or failure of a phase, or of the operation (``""``)."""
        if error is not None and not phase:
            vars(error)["is_reported"] = True
        if self._is_observed():
            described = {"state": "end"} if error is None else _describe_failure(self.kind, error, phase)
            self._emit(phase=phase, seconds=time.perf_counter() - started, **described, **fields)

    def log_failure(self, error: BaseException) -> None:
        """Log the failure of an operation that ends in the background: the program may never ask for its error."""
        log_failure(self.kind, self.directory, self.comm.rank, error, self._started)

    def _is_observed(self) -> bool:
        """Return whether a plugin gets events: mostly none does, and each phase of a load asks twice."""
        try:
            return bool(self.plugins.hook.shardckpt_event.get_hookimpls())
        except Exception:  # noqa: BLE001 - the report of the event then tells the failure
            return True

    def _emit(self, **changes: Any) -> None:
        listening = LongPhase(self, "the shardckpt_event of plugins")
        try:
            self.plugins.report(Event(**self._fields | changes))
        finally:
            listening.end()


#: Whether a call of this thread reports the failures of the calls that it makes.
_reports = ContextVar("shardckpt_reports_failures", default=False)


@contextmanager
def report_failure(kind: str, directory: object, rank: int) -> Iterator[None]:
    """Report a failure of the block once: as an event, unless an operation in it has, and on the main rank in the log.

    For public functions. Their operations begin late: an earlier step, such as a listing of a folder, may fail, too.
    """
    if _reports.get():
        yield
        return
    token, started = _reports.set(True), time.perf_counter()
    try:
        yield
    except Exception as exc:
        note_failure(kind, directory, rank, exc, started)
        raise
    finally:
        _reports.reset(token)


def note_failure(kind: str, directory: object, rank: int, error: Exception, started: float) -> None:
    """Report a failure as :func:`report_failure` does, of an error that its caller need not raise."""
    if not _has_mark(error, "is_reported"):
        vars(error)["is_reported"] = True
        _report_unbegun(kind, mask_password(str(directory)), rank, error, time.perf_counter() - started)
    log_failure(kind, directory, rank, error, started)


def report_failed(kind: str, directory: object, error: Exception | SystemExit, phase: str) -> None:
    """Report an operation that failed in a phase, and that its caller does without, by an event: the caller logs it."""
    vars(error)["phase"] = phase
    _report_unbegun(kind, mask_password(str(directory)), 0, error, 0.0)


def report_skipped(directory: object, why: str) -> None:
    """Report a damaged checkpoint that a load does without: as a load of it that failed when it was chosen."""
    report_failed("load", directory, CorruptCheckpointError(why), "choosing the step")


def report_event(kind: str, state: str, directory: object, rank: int) -> None:
    """Report an event outside of operations, which takes no time."""
    get_plugin_manager().report(Event(kind, "", state, mask_password(str(directory)), rank))


def log_failure(kind: str, directory: object, rank: int, error: BaseException, started: float) -> None:
    """Log a failure on the main rank, unless that was done: an error passes through several calls."""
    if not _has_mark(error, "is_logged"):
        vars(error)["is_logged"] = True
        if rank == 0:
            phase, text = _find_phase(kind, error), join_lines(str(error) or type(error).__name__)
            logger.error(
                "%s of %s failed%s after %.2f s: %s: %s",
                kind,
                mask_password(str(directory)),
                f" in {phase!r}" if phase else "",
                time.perf_counter() - started,
                type(error).__name__,
                text,
            )


def _report_unbegun(kind: str, directory: str, rank: int, error: Exception | SystemExit, seconds: float) -> None:
    start = Event(kind, "", "start", directory, rank, number=next(_numbers))
    plugins = get_plugin_manager()
    plugins.report(start)
    plugins.report(replace(start, seconds=seconds, blocked=seconds, **_describe_failure(kind, error)))


def _describe_failure(kind: str, error: BaseException, phase: str = "") -> dict[str, Any]:
    """Return the fields of the event of a failure of a phase, or of an operation (``""``)."""
    name = type(error).__name__
    failed = "" if phase else _find_phase(kind, error)
    return {"state": "failure", "error": str(error) or name, "error_type": name, "failed_phase": failed}


def _find_phase(kind: str, error: BaseException) -> str:
    """Return the phase of an operation in which it failed; ``""`` if in none: its span is a phase by its name."""
    phase: str = getattr(error, "phase", "")
    return "" if phase == kind else phase


def _has_mark(error: BaseException, name: str) -> bool:
    """Return whether an error, or one that it was raised from, has a mark.

    Errors that were only being handled do not count: a load of an older step after a failed one may fail by itself.
    """
    return any(vars(found).get(name) for found in list_causes(error))


class _Phase:
    """The block of :meth:`Operation.local_phase`; no generator: a load has a dozen, one of a slice few milliseconds."""

    __slots__ = ("_inner", "_name", "_operation", "_pause", "_phase")

    def __init__(self, operation: Operation, name: str) -> None:
        self._operation = operation
        self._name = name
        self._pause = pause_gc()
        self._inner = operation.comm.local_phase(name)
        self._phase: LongPhase | None = None

    def __enter__(self) -> None:
        self._phase = self._operation.start_phase(self._name, background=False)
        self._pause.__enter__()
        self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        phase: LongPhase = self._phase  # type: ignore[assignment]  # it was entered
        try:
            try:
                self._inner.__exit__(kind, error, traceback)
            finally:
                self._pause.__exit__(kind, error, traceback)
        except Exception as exc:
            self._operation.end_phase(phase, exc)
            raise
        finally:
            phase.end()
        if error is None or isinstance(error, Exception):  # an interrupt is not reported
            self._operation.end_phase(phase, error)
        return None
