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

    def __init__(self, function: Callable[[_T], _R], items: Iterable[tuple[int, _T]], *, nests: bool) -> None:
        self.function = function
        #: Whether its items may begin jobs, so that a thread without an item waits for those.
        self.nests = nests
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
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        #: Of the condition; entered by itself where nothing is waited for, which takes half the time.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._jobs: list[_Job[Any, Any]] = []
        self._helpers: list[threading.Thread] = []
        #: The number of helpers that have not left.
        self._active = 0
        #: Increased to make the present helpers end.
        self._generation = 0

    def each(
        self,
        function: Callable[[_T], _R],
        items: Iterable[tuple[int, _T]],
        own: Iterable[tuple[int, _T]] = (),
        *,
        nests: bool = True,
    ) -> dict[int, _R]:
        """Call a function on all (number, item) pairs; it may call this method, too, for pieces of its item.

        Return the results by number. The iterator is read item by item, in order; the calling thread first does the
        items of ``own``, alone. No item is begun after a failure or an interrupt. This returns when all threads have
        ended their items, and raises the function's error for the failed item with the lowest number.

        With ``nests=False`` the function does not call this method for any of ``items``: a thread that finds no item
        left ends at once, while the others do their last ones.
        """
        own = list(own)
        job = _Job(function, items, nests=nests or bool(own))
        try:
            self._begin(job)
            for number, item in own:
                if not job.errors:
                    job.do(number, item, Exception)
            job.nests = nests
            # Exception: an interrupt ends this call. In the job of another caller it is stored, and raised there.
            self._work(job, Exception)
            # other threads still work on items of this job: help them with the jobs that those items have begun
            while (other := self._open_job(lambda: bool(job.errors) or not job.busy, job)) is not None:
                self._work(other, BaseException, once=True)
        finally:
            self._end(job)
        if job.errors:
            raise job.errors[min(job.errors)]
        return job.results

    def _begin(self, job: _Job[Any, Any]) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
            with suppress(RuntimeError):  # no more threads can be started: the running threads do all the work
                while self._active < self._threads - 1:
                    helper = threading.Thread(target=self._help, args=(self._generation,), name=self._name, daemon=True)
                    helper.start()
                    self._active += 1
                    self._helpers.append(helper)

    def _end(self, job: _Job[Any, Any]) -> None:
        """Wait until no thread works on a job; after the last job end the helpers."""
        idle: list[threading.Thread] = []
        with self._changed:
            job.open = False
            job.busy.discard(threading.get_ident())
            try:
                self._changed.wait_for(lambda: not job.busy)
            finally:  # also of a second interrupt: the helpers then end after their present items
                if job in self._jobs:
                    self._jobs.remove(job)
                if not self._jobs:
                    idle, self._helpers = self._helpers, []
                    self._active = 0
                    self._generation += 1
                    self._changed.notify_all()
        for helper in idle:  # outside the lock, which they need to end
            helper.join()

    def _work(self, job: _Job[Any, Any], caught: type[BaseException], *, once: bool = False) -> None:
        """Do the items of a job as long as there are some, or one of them."""
        thread = threading.get_ident()
        try:
            with self._lock:
                taken = job.take(caught)
            while taken is not None:
                job.do(*taken, caught)
                with self._lock:
                    job.busy.discard(thread)
                    taken = None if once else job.take(caught)
        except BaseException as exc:
            # an interrupt that comes after an item is taken and before it is begun: its caller must not lack a result
            job.errors.setdefault(sys.maxsize, exc)
            job.open = False
            raise
        finally:  # also of an interrupt: those who wait for this thread are told
            with self._lock:
                job.busy.discard(thread)
                self._changed.notify_all()

    def _help(self, generation: int) -> None:
        """Work on the jobs, the oldest first, until the helpers are to end, or no more items can come."""
        while (job := self._await_job(generation)) is not None:
            self._work(job, BaseException)

    def _await_job(self, generation: int) -> _Job[Any, Any] | None:
        """Wait for a job with items to take, and return it; None if this helper is to end, and counts no more."""
        with self._changed:
            while self._generation == generation:
                for job in self._jobs:
                    if job.open:
                        return job
                if not any(job.nests for job in self._jobs):  # the caller need not wake this thread to end it
                    self._active -= 1
                    return None
                self._changed.wait()
        return None

    def _open_job(self, is_over: Callable[[], bool], after: _Job[Any, Any]) -> _Job[Any, Any] | None:
        """Wait for a job with items to take, begun after the given one, and return it; None when ``is_over()``."""
        with self._changed:
            while not is_over():
                # not an earlier one: the calling thread may be inside an item of it
                for job in self._jobs[self._jobs.index(after) + 1 :]:
                    if job.open:
                        return job
                self._changed.wait()
        return None
