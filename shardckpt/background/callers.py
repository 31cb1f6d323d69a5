"""Who runs the background part of a request: a thread of this process, or a process of its own."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

from shardckpt.background.process import WorkerProcess

if TYPE_CHECKING:
    from shardckpt.background.request import AsyncRequest


class AsyncCaller(ABC):
    """Runs the ``async_fn`` of requests behind the training."""

    @abstractmethod
    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Begin to run a staged request's ``async_fn``; the Future has what it comes to."""

    @abstractmethod
    def close(self, abort: bool = False) -> None:
        """End; ``abort`` does not wait for what is running where that can be left."""


class TemporalAsyncCaller(AsyncCaller):
    """Runs every request in a thread of its own: nothing is copied to another process, and nothing has to start.

    The interpreter waits for the threads at its exit.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Start the thread."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        thread = threading.Thread(target=_run, args=(request, future), name="shardckpt-background")
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        return future

    def close(self, abort: bool = False) -> None:  # noqa: ARG002 - threads cannot be left
        """Wait for the threads: they cannot be ended from outside."""
        for thread in self._threads:
            thread.join()


class PersistentAsyncCaller(AsyncCaller):
    """Runs requests one after the other in one process, which shares no interpreter lock with the training.

    The process starts with the first request, or ahead of it by :meth:`warmup`, and imports nothing of the program's:
    no ``__main__`` guard is needed. What is handed to it must be picklable; staged tensors are mapped, not copied.
    """

    _warm: ClassVar[WorkerProcess | None] = None

    def __init__(self) -> None:
        self._worker: WorkerProcess | None = None

    def schedule_async_call(self, request: AsyncRequest) -> Future[Any]:
        """Hand it to the process."""
        if self._worker is None or not self._worker.alive:
            self.warmup()
            self._worker, PersistentAsyncCaller._warm = PersistentAsyncCaller._warm, None
        return self._worker.submit(request)  # type: ignore[union-attr]

    def close(self, abort: bool = False) -> None:
        """End the process: after what it is doing, or at once."""
        if self._worker is not None:
            self._worker.close(kill=abort)
            self._worker = None

    @classmethod
    def warmup(cls) -> None:
        """Start the process that the next caller will use, so that its first request finds it ready."""
        if cls._warm is None or not cls._warm.alive:
            cls._warm = WorkerProcess()


def _run(request: AsyncRequest, future: Future[Any]) -> None:
    try:
        result = request.run()
    except BaseException as exc:  # noqa: BLE001 - it is raised in the training process
        future.set_exception(exc)
    else:
        future.set_result(result)


__all__ = ["AsyncCaller", "PersistentAsyncCaller", "TemporalAsyncCaller"]
