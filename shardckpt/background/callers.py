"""Callers: each runs the background part of requests, in threads of this process or in another process."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.background.process import WorkerProcess
from shardckpt.background.staging_buffer import check_mappable

if TYPE_CHECKING:
    from shardckpt.background.request import AsyncRequest


class AsyncCaller(ABC):
    """Runs the ``async_fn`` of requests in the background."""

    @abstractmethod
    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Begin to run a staged request's ``async_fn``, and return the Future of its result or error."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """Wait until all requests have run; with ``abort``, end what is running where that is possible."""


class TemporalAsyncCaller(AsyncCaller):
    """Runs each request in a thread of its own: nothing is sent to another process, and no process has to start.

    The thread competes with the training for Python's interpreter lock (GIL). At its exit the interpreter waits for the
    threads.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Start a thread that runs ``async_fn``, and return the Future of its result or error."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # a cancelled Future would refuse the result that the thread sets
        thread = threading.Thread(target=_run, args=(request, future), name="shardckpt-background")
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        return future

    def close(self, abort: bool = False) -> None:  # noqa: ARG002 - threads cannot be ended
        """Wait for the threads: they cannot be ended from outside."""
        for thread in self._threads:
            thread.join()


class PersistentAsyncCaller(AsyncCaller):
    """Runs requests one after the other in one process, which does not compete for the training's GIL.

    The process starts with the first request, or before by :meth:`warmup`. It does not import the program's main
    module: no ``__main__`` guard is needed. Requests must be picklable; staged tensors are mapped, not copied.

    Raises:
        CheckpointingException: staged tensors cannot be mapped on this machine: there is no ``/proc``.
    """

    #: The process that :meth:`warmup` started, for the first caller that needs one. Callers may be in several threads.
    _warm: ClassVar[WorkerProcess | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        check_mappable()
        self._worker: WorkerProcess | None = None

    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Send the request to the process, and return the Future of its result or error."""
        if self._worker is None or not self._worker.alive:
            if self._worker is not None:
                self._worker.warn_of_end(request.name)
            warm = self._pop_warm()
            self._worker = warm if warm is not None and warm.alive else WorkerProcess()
        return self._worker.submit(request)

    def close(self, abort: bool = False) -> None:
        """End the process: after its requests, or at once with ``abort``."""
        if self._worker is not None:
            self._worker.close(kill=abort)
            self._worker = None

    @classmethod
    def warmup(cls) -> None:
        """Start the process of the next caller, so that its first request need not wait for the start."""
        with cls._lock:
            if cls._warm is None or not cls._warm.alive:
                PersistentAsyncCaller._warm = WorkerProcess()

    @classmethod
    def _pop_warm(cls) -> WorkerProcess | None:
        with cls._lock:
            warm, PersistentAsyncCaller._warm = PersistentAsyncCaller._warm, None
        return warm


def _run(request: AsyncRequest, future: Future[Any]) -> None:
    try:
        result = request.run()
    except BaseException as exc:  # noqa: BLE001 - the training's thread raises it, from the Future
        future.set_exception(exc)
    else:
        future.set_result(result)
