"""Threads that share work: what they are given, and the pieces that one of them cuts its own share into."""

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
        #: Threads that work on an item.
        self.busy: set[int] = set()
        self.results: dict[int, _R] = {}
        self.errors: dict[int, BaseException] = {}

    def take(self, caught: type[BaseException]) -> tuple[int, _T] | None:
        """The next item and its number; None if there is none, or what makes the items has failed."""
        found = None
        try:
            found = next(self._items, None) if self.open else None
        except caught as exc:
            self.errors[sys.maxsize] = exc  # behind those of the items that came before
        if found is None:
            self.open = False
        else:
            self.busy.add(threading.get_ident())
        return found

    def do(self, number: int, item: _T, caught: type[BaseException]) -> None:
        """Call the function, and keep what it returns or raises."""
        try:
            self.results[number] = self.function(item)
        except caught as exc:
            self.errors[number] = exc
            self.open = False


class Workers:
    """Threads that exist as long as there is work, and the thread that brings it as one of them.

    A thread that waits for its items does pieces of the others' meanwhile. With the executors of concurrent.futures it
    would idle: of two threads, the last large item would then keep only one busy, and take twice as long.

    Args:
        threads: How many work, the caller among them.
        name: Of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._name = name
        self._changed = threading.Condition()
        self._jobs: list[_Job[Any, Any]] = []
        self._helpers: list[threading.Thread] = []
        #: Changes when the helpers that there are shall end.
        self._generation = 0

    def each(
        self, function: Callable[[_T], _R], items: Iterable[tuple[int, _T]], own: Iterable[tuple[int, _T]] = ()
    ) -> dict[int, _R]:
        """``function`` of all items, by their numbers; the function may call this again, for pieces of an item.

        After the first failure, or an interrupt, nothing more is begun; of several failures the one with the lowest
        number is raised, once all that was begun has ended.

        Args:
            function: Called in any of the threads.
            items: Numbered; taken in this order, when their turn has come.
            own: More of them, for the calling thread alone, which does them first.
        """
        job = _Job(function, items)
        try:
            self._begin(job)
            for number, item in own:
                if not job.errors:
                    job.do(number, item, Exception)
            while self._step(job, Exception):
                pass
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
            with suppress(RuntimeError):  # where no more threads may be had, those that there are do it all
                while len(self._helpers) < self._threads - 1:
                    helper = threading.Thread(target=self._help, args=(self._generation,), name=self._name, daemon=True)
                    helper.start()
                    self._helpers.append(helper)

    def _end(self, job: _Job[Any, Any]) -> None:
        """Wait for what other threads have begun of a job; with the last job the helpers end."""
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
        for helper in idle:
            helper.join()

    def _step(self, job: _Job[Any, Any], caught: type[BaseException]) -> bool:
        """Do one item of a job; whether there was one."""
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
        """Work on whatever job is there, the oldest first."""
        while (job := self._open_job(lambda: self._generation != generation)) is not None:
            while self._step(job, BaseException):
                pass

    def _open_job(self, is_over: Callable[[], bool], after: _Job[Any, Any] | None = None) -> _Job[Any, Any] | None:
        """The first job that has items to take, when there is one; None when it is over.

        Args:
            is_over: Whether to wait no more.
            after: Only jobs that came later: of those the thread that asks is not in the midst of one.
        """
        with self._changed:
            while not is_over():
                first = 0 if after is None else self._jobs.index(after) + 1
                for job in self._jobs[first:]:
                    if job.open:
                        return job
                self._changed.wait()
        return None


__all__ = ["Workers"]
