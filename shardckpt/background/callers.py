"""Run the ``async_fn`` of save requests in the background: in threads (Temporal) or a child process (Persistent)."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from traceback import clear_frames
from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.background.process import WorkerProcess
from shardckpt.background.staging_buffer import check_mappable
from shardckpt.errors import list_causes

if TYPE_CHECKING:
    from shardckpt.background.request import AsyncRequest

logger = logging.getLogger(__name__)


class AsyncCaller(ABC):
    """Runs the ``async_fn`` of requests in the background; a queue has one caller."""

    @abstractmethod
    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Begin to run a staged request's ``async_fn``, and return the Future of its result or error."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Wait until all requests have run; with ``abort``, kill the child process instead, if there is one."""


class TemporalAsyncCaller(AsyncCaller):
    """Runs each request in a thread of its own: no process has to start, and no request is pickled.

    The threads compete with the training for Python's interpreter lock (GIL). They are not daemons: the interpreter
    does not exit before a save has finished.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Start a thread that runs ``async_fn``, and return the Future of the result or error."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a cancelled Future would refuse the result that the thread sets
        # a thread inherits the flag, and the caller's may be a daemon
        thread = threading.Thread(target=_run, args=(request, future), name="shardckpt-background", daemon=False)
        try:
            thread.start()
        except RuntimeError as exc:  # the process has as many as the system or its container lets it have
            logger.warning("%s: this background save is written before save returns", exc)
            _run(request, future)
            return future
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        return future

    def close(self, abort: bool = False) -> None:  # noqa: ARG002 - a thread cannot be killed
        """Wait until all requests have run. ``abort`` changes nothing: a thread cannot be killed."""
        for thread in self._threads:
            thread.join()


class PersistentAsyncCaller(AsyncCaller):
    """Runs requests one after the other in one child process, which does not compete for the training's GIL.

    The process starts with the first request, or earlier by :meth:`warmup`. The process does not import the program's
    main module, so programs need no ``__main__`` guard. Requests must be picklable; staged tensors are mapped, not
    copied.

    Raises:
        CheckpointingException: this machine has no ``/proc``, by which the process maps staged tensors.
    """

    #: The process that :meth:`warmup` started, for the first caller that needs one.
    _warm: ClassVar[WorkerProcess | None] = None
    #: Held to read or replace ``_warm``: callers may be in several threads.
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        check_mappable()
        self._worker: WorkerProcess | None = None

    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Send the request to the process, and return the Future of the result or error."""
        if self._worker is not None and not self._worker.alive:
            self._worker.warn_of_end(request.name)
            self._worker = None
        if self._worker is None:
            warm = self._pop_warm()
            self._worker = warm if warm is not None and warm.alive else WorkerProcess()
        return self._worker.submit(request)

    def close(self, abort: bool = False) -> None:
        """End the process once all requests have run; with ``abort``, kill the process at once."""
        if self._worker is not None:
            self._worker.close(abort=abort)
            self._worker = None

    @staticmethod
    def warmup() -> None:
        """Start the process of the next caller, so that the first request need not wait for the start."""
        with PersistentAsyncCaller._lock:  # this class and its subclasses share one warm process
            if PersistentAsyncCaller._warm is None or not PersistentAsyncCaller._warm.alive:
                PersistentAsyncCaller._warm = WorkerProcess()

    @staticmethod
    def _pop_warm() -> WorkerProcess | None:
        """Return the process that :meth:`warmup` started, and leave none for other callers."""
        with PersistentAsyncCaller._lock:
            warm, PersistentAsyncCaller._warm = PersistentAsyncCaller._warm, None
        return warm


def clear_error(error: BaseException) -> None:
    """Clear the frames of an error and of its causes.

    They have the staged tensors, and live as long as the error does.
    """
    for each in list_causes(error, with_context=True):
        clear_frames(each.__traceback__)


def _run(request: AsyncRequest, future: Future[Any]) -> None:
    """Set the Future to the outcome of the request's ``async_fn``."""
    try:
        future.set_result(request.run())
    except BaseException as exc:  # noqa: BLE001 - the training's thread raises it, from the Future
        clear_error(exc)
        future.set_exception(exc)
    finally:
        # Future -> error -> traceback -> this frame -> Future would be a cycle that keeps the staged tensors
        del request, future
