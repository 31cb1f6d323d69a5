"""The queue of background saves, finalized in order: Megatron's AsyncCallsQueue."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401 - registers its exit function before ours
import logging
import os
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.background.callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller, clear_error
from shardckpt.background.ending import say, wait_for_all_ends
from shardckpt.background.request import AsyncRequest
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import ProcessGroup
    from typing_extensions import Self

    from shardckpt.background.request import RequestFields

logger = logging.getLogger(__name__)

#: Seconds that ranks wait between two collectives, so that they enter each one well within a process group's timeout.
_ROUND = 1.0


class _Call(NamedTuple):
    """A scheduled request without its arguments, and the Future that has its outcome."""

    request: AsyncRequest
    future: Future[Any]


class AsyncCallsQueue:
    """Schedules requests, and finalizes them in order when all ranks have written them; a context manager.

    All ranks must schedule the same requests in the same order, and call the collective methods in the same order. At
    the end of the ``with`` block it closes. After an error in the block, a single process finalizes its requests; one
    of several ranks abandons them, since the other ranks may not have failed and would not join a collective. Not
    thread-safe.

    Args:
        persistent: Whether a separate process writes, instead of threads.
        process_group: The ranks; by default all, or this process alone without torch.distributed.

    Example:
        >>> queue = AsyncCallsQueue()  # doctest: +SKIP
        >>> queue.schedule_async_request(save(state, path, async_sharded_save=True))
        >>> for step in steps:  # training goes on
        ...     queue.maybe_finalize_async_calls()  # commits the save once all ranks have written it
        >>> queue.close()
    """

    def __init__(self, persistent: bool = False, process_group: ProcessGroup | None = None) -> None:
        self._caller: AsyncCaller = PersistentAsyncCaller() if persistent else TemporalAsyncCaller()
        self._group = process_group
        self._comm: Comm | None = None
        self._calls: deque[_Call] = deque()
        self._scheduled = 0

    def schedule_async_request(self, async_request: RequestFields | None) -> int:
        """Stage a request, and begin to write it in the background.

        When this returns, the request's tensors may change: their values are copied. (Objects and common state were
        copied when the request was made.) A failure is not raised here but by :meth:`maybe_finalize_async_calls`, on
        all ranks.

        Args:
            async_request: The result of :func:`~shardckpt.dist_checkpointing.save`, or another library's request:
                Megatron's, nvidia-resiliency-ext's, or any object with their fields. A library's ``async_fn`` runs in a
                thread, or in the process of a persistent queue, whatever that library's own queue does.

        Returns:
            The request's number in this queue, from 1.

        Raises:
            CheckpointingException: it is no request; nothing is scheduled.
        """
        given = AsyncRequest.of(async_request)
        if self._comm is None or not self._calls:  # anew where nothing is in flight: the group may be another since
            self._comm = Comm(self._group)
        self._scheduled += 1
        request = given.freeze()._replace(call_idx=self._scheduled)
        try:
            request = request.staged()
            written = self._caller.schedule_async_call(request)
        except Exception as exc:  # noqa: BLE001 - the other ranks go on; finalizing raises it on all
            clear_error(exc)
            written = Future()
            written.set_exception(exc)
        except BaseException as exc:
            _fail(request, exc)
            raise
        # without its arguments: the keeper of a request's error would keep the staged tensors
        kept = request._replace(async_fn=None, async_fn_args=(), async_fn_kwargs={}, preload_fn=None)
        del async_request, given, request
        future: Future[Any] = Future()
        written.add_done_callback(lambda done: kept.finish_writing(done, future))
        del written  # it may have an error whose traceback has this frame
        self._calls.append(_Call(kept, future))
        _busy[self] = os.getpid()
        return self._scheduled

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False, timeout: float | None = None
    ) -> list[int]:
        """Collective: finalize the requests that all ranks have written, in the order of scheduling.

        Args:
            blocking: Whether to wait for all requests.
            no_dist: Whether to consider this rank alone, for requests whose finalize functions need no other; the call
                is then not collective.
            timeout: Seconds to wait with ``blocking``, by default without limit; requests that are not written then
                stay scheduled.

        Returns:
            The numbers of the finalized requests.

        Raises:
            CheckpointingException: the same on every rank: a request failed on some rank, and was dropped.
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
        """Return the number of requests that are scheduled and not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Collective: finalize all requests, and end the threads or the process that writes.

        Args:
            abort: Whether to abandon the requests that are not finalized; the call is then not collective.

        Raises:
            CheckpointingException: a request failed; the others are finalized, and the queue is closed.
        """
        try:
            if not abort:
                self._finalize_all()
        finally:
            self._caller.close(abort)
            while self._calls:
                error = CheckpointingException("its queue was closed before it was finalized")
                _fail(self._calls.popleft().request, error)  # which removes its files
            _busy.pop(self, None)

    @classmethod
    def warmup_persistent_caller(cls, rank: int | None = None, **_: Any) -> None:  # noqa: ARG003 - Megatron's
        """Start the process of the next persistent queue, so that its first save need not wait for the start.

        Args:
            rank: Megatron's, without effect, as are its keywords.
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
        """Try to finalize every request; then raise the first error."""
        first: CheckpointingException | None = None
        before = -1
        while self._calls and len(self._calls) != before:  # unchanged: ranks are lost or out of step
            before = len(self._calls)
            try:
                self.maybe_finalize_async_calls(blocking=True)
            except CheckpointingException as exc:
                first = first or exc
        if first is not None:
            raise first

    def finalize_at_exit(self) -> None:
        """Finalize the requests at the end of the program, if this is the only rank or all ranks end together.

        Else abandon them, and report the lost saves to the user: a rank that still trains would not join a collective.
        """
        if self._comm is None or self._comm.world_size == 1 or not self._calls:
            self.close()
            return
        lost = ", ".join(call.request.name for call in self._calls)
        first = self._calls[0].request.call_idx  # not its path, which may differ among ranks
        why = wait_for_all_ends(f"end/{first}/{len(self._calls)}/{self._scheduled}", self._comm, self._group)
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


#: Queues with unfinalized requests, and the id of the process that owns each: a fork must not finalize them.
_busy: dict[AsyncCallsQueue, int] = {}


def _end_queues() -> None:
    for queue, pid in list(_busy.items()):
        if pid != os.getpid():
            continue
        try:
            queue.finalize_at_exit()
        except CheckpointingException as exc:
            if not exc.is_logged:  # a request of another library
                logger.exception("a background save failed at the end of the program: it is absent")


# Not atexit: its functions run after concurrent.futures has ended its threads, and writing needs those threads.
getattr(threading, "_register_atexit", atexit.register)(_end_queues)


def _fail(request: AsyncRequest, error: BaseException) -> None:
    if request.failed_fn is not None:
        request.failed_fn(error)


def _is_written(call: _Call, comm: Comm, blocking: bool, deadline: float | None) -> bool:
    """Collective: whether all ranks have written their first request, or one of them has failed to."""
    number, future = call.request.call_idx, call.future
    waiting = None
    # All ranks leave the loop in the same round, because each decides on the maximum over all ranks.
    try:
        while True:
            over = not blocking or (deadline is not None and time.monotonic() >= deadline)
            done = future.done()
            broken = done and future.exception() is not None
            newest, oldest, writing, failed, end = comm.largest(number, -number, not done, broken, over)
            if newest != -oldest:
                raise CheckpointingException(
                    f"ranks are at different background saves, number {-oldest} and number {newest}: all ranks must "
                    "schedule the same requests in the same order"
                )
            if failed or not writing:
                return True
            if end:
                return False
            if done:  # else the wait for this rank's own writing is reported
                waiting = waiting or comm.begin_wait(f"its part of {call.request.name} is written", time.monotonic())
                waiting.report_once(time.monotonic())
            wait([future], _ROUND if deadline is None else max(0.0, min(_ROUND, deadline - time.monotonic())))
    finally:
        if waiting is not None:
            waiting.end()
