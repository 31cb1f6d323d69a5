"""Threads that share work: a list of items, and the pieces into which a thread may cut its own item."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_T = TypeVar("_T")
_R = TypeVar("_R")


class _Job(Generic[_T, _R]):
    """Items that several threads take one after the other; after the first failure no more are taken."""

    def __init__(self, function: Callable[[_T], _R], items: Iterable[tuple[int, _T]]) -> None:
        self.function = function
        self._items = iter(items)
        self.open = True
        #: Ids of the threads that work on an item.
        self.busy: set[int] = set()
        self.results: dict[int, _R] = {}
        self.errors: dict[int, BaseException] = {}

    def take(self, caught: type[BaseException]) -> tuple[int, _T] | None:
        """Take the next item and its number; None if there is none, or if the iterator of items failed."""
        found = None
        try:
            found = next(self._items, None) if self.open else None
        except caught as exc:
            self.errors[sys.maxsize] = exc  # the last: errors of items that came before are raised first
        if found is None:
            self.open = False
        else:
            self.busy.add(threading.get_ident())
        return found

    def do(self, number: int, item: _T, caught: type[BaseException]) -> None:
        """Call the function on an item, and store its result or error."""
        try:
            self.results[number] = self.function(item)
        except caught as exc:
            self.errors[number] = exc
            self.open = False


class Workers:
    """Threads that exist while there is work; the calling thread is one of them.

    A thread that would wait for others works on pieces of their items instead. With the executors of concurrent.futures
    it would be idle: the last large item would then use one of two threads, and take twice as long.

    Args:
        threads: How many, the caller included.
        name: Name of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._changed = threading.Condition()
        self._jobs: list[_Job[Any, Any]] = []
        self._helpers: list[threading.Thread] = []
        #: Increased to make the present helpers end.
        self._generation = 0

    def each(
        self, function: Callable[[_T], _R], items: Iterable[tuple[int, _T]], own: Iterable[tuple[int, _T]] = ()
    ) -> dict[int, _R]:
        """Call a function on all items; the function may call this method, too, for pieces of its item.

        No item is begun after a failure or an interrupt. This returns when all threads have ended what they began.

        Args:
            function: Called in any of the threads.
            items: (number, item) pairs; the iterator is read item by item, in order.
            own: More such pairs, which the calling thread does first, alone.

        Returns:
            The results by number.

        Raises:
            Exception: what the function raised for the failed item with the lowest number.
        """
        job = _Job(function, items)
        try:
            self._begin(job)
            for number, item in own:
                if not job.errors:
                    job.do(number, item, Exception)
            # Exception: an interrupt ends this call. In the job of another caller it is stored, and raised there.
            while self._step(job, Exception):
                pass
            # other threads still work on items of this job: help them with the jobs that those items have begun
            while (other := self._open_job(lambda: bool(job.errors) or not job.busy, job)) is not None:
                self._step(other, BaseException)
        finally:
            self._end(job)
        if job.errors:
            raise job.errors[min(job.errors)]
        return job.results

    def _begin(self, job: _Job[Any, Any]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
            with suppress(RuntimeError):  # no more threads can be started: those that run do all the work
                while len(self._helpers) < self._threads - 1:
                    helper = threading.Thread(target=self._help, args=(self._generation,), name=self._name, daemon=True)
                    helper.start()
                    self._helpers.append(helper)

    def _end(self, job: _Job[Any, Any]) -> None:
        """Wait until no thread works on a job; after the last job end the helpers."""
        idle: list[threading.Thread] = []
        with self._changed:
            job.open = False
            job.busy.discard(threading.get_ident())
            self._changed.wait_for(lambda: not job.busy)
            if job in self._jobs:
                self._jobs.remove(job)
            if not self._jobs:
                idle, self._helpers = self._helpers, []
                self._generation += 1
                self._changed.notify_all()
        for helper in idle:  # outside the lock, which they need to end
            helper.join()

    def _step(self, job: _Job[Any, Any], caught: type[BaseException]) -> bool:
        """Do one item of a job; return False if there was none."""
        with self._changed:
            taken = job.take(caught)
        if taken is None:
            return False
        try:
            job.do(*taken, caught)
        finally:
            with self._changed:
                job.busy.discard(threading.get_ident())
                self._changed.notify_all()
        return True

    def _help(self, generation: int) -> None:
        """Work on the jobs, the oldest first, until the helpers are to end."""
        while (job := self._open_job(lambda: self._generation != generation)) is not None:
            while self._step(job, BaseException):
                pass

    def _open_job(self, is_over: Callable[[], bool], after: _Job[Any, Any] | None = None) -> _Job[Any, Any] | None:
        """Wait for a job with items to take, begun after the given one, and return it; None when ``is_over()``."""
        with self._changed:
            while not is_over():
                # not an earlier one: the calling thread may be inside an item of it
                first = 0 if after is None else self._jobs.index(after) + 1
                for job in self._jobs[first:]:
                    if job.open:
                        return job
                self._changed.wait()
        return None
