"""The requests that are written behind the training, in order: Megatron's AsyncCallsQueue."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - what it does at the end of the program must be registered before ours
import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.background.callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller
from shardckpt.background.ending import meet_at_end, say
from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from shardckpt.background.request import AsyncRequest

logger = logging.getLogger(__name__)

#: Seconds after which ranks that wait tell each other that they still do: less than any process group's timeout.
_ROUND = 1.0


class _Call(NamedTuple):
    """A request on its way."""

    request: AsyncRequest
    future: Future[Any]


class AsyncCallsQueue:
    """Schedules requests, and finalizes them in order when they are written on all ranks; a context manager.

    All ranks schedule the same requests in the same order, and call :meth:`maybe_finalize_async_calls` and
    :meth:`close` alike: these are collective. Left by an error, it finalizes what one process can finalize alone; with
    more ranks, which may not have failed, it gives its requests up. Not for use by several threads.

    Args:
        persistent: Whether a process of its own writes, instead of a thread.
        process_group: The ranks; by default all, or this process alone without torch.distributed.
    """

    def __init__(self, persistent: bool = False, process_group: ProcessGroup | None = None) -> None:
        self._caller: AsyncCaller = PersistentAsyncCaller() if persistent else TemporalAsyncCaller()
        self._group = process_group
        self._comm: Comm | None = None
        self._calls: deque[_Call] = deque()
        self._scheduled = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Stage a request and begin to write it; returns its number.

        When this returns, the tensors that the request is to save may change; their values are those of this moment.
        (Objects and common state were taken when the request was made.) What goes wrong with it is raised by
        :meth:`maybe_finalize_async_calls`, on all ranks.
        """
        if self._comm is None or not self._calls:
            self._comm = Comm(self._group)
        self._scheduled += 1
        request = async_request.freeze()._replace(call_idx=self._scheduled)
        try:
            request = request.staged()
            written = self._caller.schedule_async_call(request)
        except Exception as exc:  # noqa: BLE001 - the other ranks go on: they hear of it when they finalize
            written = Future()
            written.set_exception(exc)
        except BaseException as exc:
            _fail(request, exc)
            raise
        future: Future[Any] = Future()
        written.add_done_callback(lambda written: _hand_on(written, request, future))
        self._calls.append(_Call(request, future))
        _busy[self] = os.getpid()
        return self._scheduled

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False, timeout: float | None = None
    ) -> list[int]:
        """Finalize the requests that are written on all ranks, in the order in which they were scheduled.

        Args:
            blocking: Wait for all of them.
            no_dist: Look at this rank alone: for requests whose finalize functions need no other.
            timeout: Seconds to wait, by default without end: what is not written by then stays scheduled.

        Returns:
            The numbers of the requests that were finalized.

        Raises:
            CheckpointingException: the same on every rank: a request failed on some rank, and is given up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        finalized: list[int] = []
        while self._calls:
            comm = Comm(alone=True) if no_dist or self._comm is None else self._comm
            if not _is_written(self._calls[0], comm, blocking, deadline):
                return finalized
            call = self._calls.popleft()
            call.request.finalize(call.future, comm)
            finalized.append(call.request.call_idx)
        _busy.pop(self, None)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """Number of requests that are scheduled and not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Finalize all requests and end the background; ``abort`` gives up those that are not finalized yet.

        Raises:
            CheckpointingException: a request failed; the others are finalized, and the background has ended.
        """
        try:
            if not abort:
                self._finalize_all()
        finally:
            self._caller.close(abort)
            self._give_up()

    @classmethod
    def warmup_persistent_caller(cls, *_: Any, **__: Any) -> None:
        """Start the process of the next queue that is persistent, so that its first save finds it ready.

        Megatron's arguments are accepted, and mean nothing here.
        """
        PersistentAsyncCaller.warmup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        alone = self._comm is None or self._comm.world_size == 1
        self.close(abort=error is not None and not alone)

    def _finalize_all(self) -> None:
        """Finalize every request; the first error is raised when all have been tried."""
        first: CheckpointingException | None = None
        before = -1
        while self._calls and len(self._calls) != before:  # else it was not given up: ranks are lost, or out of step
            before = len(self._calls)
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except CheckpointingException as exc:
                first = first or exc
        if first is not None:
            raise first

    def _give_up(self) -> None:
        """Leave nothing of what is not finalized."""
        while self._calls:
            _fail(self._calls.popleft().request, CheckpointingException("its queue was closed before it was finalized"))
        _busy.pop(self, None)

    def end_with_the_program(self) -> None:
        """Finish what this process can finish alone, or with all ranks where they end together; say what is lost."""
        if self._comm is None or self._comm.world_size == 1 or not self._calls:
            self.close()
            return
        lost = ", ".join(call.request.name for call in self._calls)
        first = self._calls[0].request.call_idx  # no path: ranks may have the same place by different names
        why = meet_at_end(f"end/{first}/{len(self._calls)}/{self._scheduled}", self._comm, self._group)
        if not why:
            try:
                self.close()
            except CheckpointingException as exc:
                why = f"it failed: {exc}"
            else:
                return
        say(
            f"the program ends, and a background save was not finalized: {lost} is absent, or as it was before "
            f"({why}). Call close() of its CheckpointManager or AsyncCallsQueue, or "
            "maybe_finalize_async_calls(blocking=True), on all ranks before the process group is destroyed",
            self._comm,
        )
        self.close(abort=True)


#: Queues with requests that are not finalized, and the processes that they belong to: not a fork's.
_busy: dict[AsyncCallsQueue, int] = {}


def _end_queues() -> None:
    for queue, pid in list(_busy.items()):
        if pid != os.getpid():
            continue
        try:
            queue.end_with_the_program()
        except CheckpointingException:
            logger.exception("a background save failed at the end of the program: it is absent")


# before concurrent.futures ends its threads, which writing needs: functions of atexit come after that
getattr(threading, "_register_atexit", atexit.register)(_end_queues)


def _hand_on(written: Future[Any], request: AsyncRequest, future: Future[Any]) -> None:
    """Let a request count as written when its ``written_fn`` has run: futures wake who waits before they call back."""
    try:
        if request.written_fn is not None:
            request.written_fn(written)
        future.set_result(written.result())
    except BaseException as exc:  # noqa: BLE001 - it is raised by the one who finalizes
        future.set_exception(exc)


def _fail(request: AsyncRequest, error: BaseException) -> None:
    if request.failed_fn is not None:
        request.failed_fn(error)


def _failed(call: _Call) -> bool:
    return call.future.done() and call.future.exception() is not None


def _is_written(call: _Call, comm: Comm, blocking: bool, deadline: float | None) -> bool:
    """Whether all ranks have written the request that they have in front, or one of them has failed to."""
    number = call.request.call_idx
    while True:
        over = not blocking or (deadline is not None and time.monotonic() >= deadline)
        newest, oldest, writing, failed, end = comm.largest(
            number, -number, not call.future.done(), _failed(call), over
        )
        if newest != -oldest:
            raise CheckpointingException(
                f"ranks are at different background saves, number {-oldest} and number {newest}: all ranks must "
                "schedule the same requests in the same order"
            )
        if failed or not writing:
            return True
        if end:
            return False
        wait([call.future], _ROUND if deadline is None else max(0.0, min(_ROUND, deadline - time.monotonic())))


__all__ = ["AsyncCallsQueue"]
