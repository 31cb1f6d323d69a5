"""Ranks of a process group on a simulated clock: they wait, fail, stop and die in turns, and no real time passes."""

from __future__ import annotations

import heapq
import itertools
import math
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Semaphore, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.distributed.group_failure import POLL_INTERVAL, Diagnosis, GroupFailure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

#: Time of day at which a simulation begins.
BEGIN = 1_000_000.0


class Gone(BaseException):
    """A simulated process has died or stopped: its thread ends here."""


class Clock:
    """Seconds that pass only while every thread of the simulation sleeps; one of them runs at a time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._sleepers: list[tuple[float, int, Semaphore]] = []
        self._numbers = itertools.count()
        self._is_quiet = Semaphore(0)

    def sleep(self, seconds: float) -> None:
        """Let the others run, until so many seconds have passed."""
        wakes = Semaphore(0)
        heapq.heappush(self._sleepers, (self.now + seconds, next(self._numbers), wakes))
        self._is_quiet.release()
        wakes.acquire()

    def run(self, functions: Mapping[int, Callable[[], Any]]) -> dict[int, Any]:
        """Run functions by their ranks at the same time; return what those that came to their end have returned.

        What one of them raises is raised here.
        """
        results: dict[int, Any] = {}
        errors: list[BaseException] = []

        def run_one(rank: int, function: Callable[[], Any]) -> None:
            try:
                self.sleep(0)
                results[rank] = function()
            except Gone:
                pass
            except BaseException as exc:  # noqa: BLE001 - it is raised below
                errors.append(exc)
            finally:
                self._is_quiet.release()

        for rank, function in functions.items():
            Thread(target=run_one, args=(rank, function), daemon=True).start()
            self._is_quiet.acquire()  # it sleeps
        while self._sleepers:
            self.now, _, wakes = heapq.heappop(self._sleepers)
            wakes.release()
            self._is_quiet.acquire()  # it sleeps again, or has ended
        if errors:
            raise errors[0]
        return results


class Outcome(NamedTuple):
    """What a rank found out, and when, in seconds of the simulation."""

    diagnosis: Diagnosis
    at: float


class Store:
    """A store of which one process may be the host."""

    def __init__(self, job: Job) -> None:
        self.values: dict[str, bytes] = {}
        self._job = job

    def check(self, keys: Sequence[str]) -> bool:
        """Whether it has all of the keys."""
        return self._alive_values().keys() >= set(keys)

    def get(self, key: str) -> bytes:
        """The value of a key."""
        return self._alive_values()[key]

    def set(self, key: str, value: bytes) -> None:
        """Keep a value."""
        self._alive_values()[key] = value

    def compare_set(self, key: str, expected: str, desired: str) -> None:
        """Keep a value in the place of the expected one; "" stands for none."""
        if self._alive_values().get(key, b"") == expected.encode():
            self.values[key] = desired.encode()

    def _alive_values(self) -> dict[str, bytes]:
        if self._job.has_ended(self._job.host):
            raise ConnectionError("the process that hosts the store has ended")
        return self.values


@dataclass
class Job:
    """Ranks that meet in one collective of a group, of which some come late, die or stop. Times are in seconds.

    Attributes:
        ranks: Of the group.
        world_size: Ranks of the job.
        timeout: Of the group.
        host: The rank that hosts the store.
        enters: When ranks enter the collective; the others do so at once.
        dies: When ranks die.
        closes_late: How long after a rank's death the system closes its connections.
        stops: When ranks stop.
        fails: Ranks whose call fails at once, and breaks no connection.
        delay: How long ranks take to wake up when a collective fails, and for every call of the store and of gloo.
        clock_offsets: By how much the clocks of ranks are ahead.
        store: Where the group's ranks met.
        alive: Where all ranks of the job met.
    """

    ranks: Sequence[int] = (0, 1, 2)
    world_size: int = 3
    timeout: float = 600.0
    host: int | None = None
    enters: Mapping[int, float] = field(default_factory=dict)
    dies: Mapping[int, float] = field(default_factory=dict)
    closes_late: Mapping[int, float] = field(default_factory=dict)
    stops: Mapping[int, float] = field(default_factory=dict)
    fails: Sequence[int] = ()
    delay: Mapping[int, float] = field(default_factory=dict)
    clock_offsets: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.store, self.alive = Store(self), Store(self)
        self.closed: set[int] = set()
        self._left: set[int] = set()

    def run(self) -> dict[int, Outcome]:
        """Let the ranks meet; return what the survivors found out."""
        return self.run_each(dict.fromkeys(self.ranks, self.meet))

    def run_each(self, functions: Mapping[int, Callable[[int], Any]]) -> dict[int, Any]:
        """Run a function of its number on each rank, whose process ends after it."""

        def run(rank: int, function: Callable[[int], Any]) -> Any:
            found = function(rank)
            self._left.add(rank)
            return found

        return self.clock.run({rank: lambda rank=rank, f=f: run(rank, f) for rank, f in functions.items()})  # type: ignore[misc]

    def meet(self, rank: int) -> Outcome:
        """Enter the collective, and find out why it fails."""
        view = View(self, rank)
        view.sleep(self.enters.get(rank, 0.0))
        error = self._wait(view)
        view.sleep(self.delay.get(rank, 0.0))
        return Outcome(GroupFailure(view).diagnose(error, "meeting"), self.clock.now)  # type: ignore[arg-type]

    def _wait(self, view: View) -> Exception:
        """Wait as a Comm does, the main rank for all and all for the main rank, until the collective fails here."""
        if view.rank in self.fails:
            return RuntimeError("tensors of different sizes")
        ends, failure = self.clock.now + self.timeout, GroupFailure(view)  # type: ignore[arg-type]
        partners = self.ranks if view.rank == self.ranks[0] else self.ranks[:1]
        while True:
            if any(view.is_closed(rank) for rank in partners if rank != view.rank):
                return RuntimeError("Connection closed by peer")
            if self.clock.now >= ends:
                self.closed.add(view.rank)  # as gloo does, before this rank knows
                return RuntimeError("Timed out waiting for recv operation to complete")
            if failure.is_announced():
                return RuntimeError("it failed on another rank")
            view.sleep(min(POLL_INTERVAL, ends - self.clock.now))

    def has_ended(self, rank: int | None) -> bool:
        """Whether a rank's process has died or come to its end."""
        return rank in self._left or self.clock.now >= self.dies.get(rank, math.inf)  # type: ignore[arg-type]

    def has_stopped(self, rank: int | None) -> bool:
        """Whether a rank's process stands still."""
        return self.clock.now >= self.stops.get(rank, math.inf)  # type: ignore[arg-type]


class View:
    """What one rank of a job sees, as `GroupView` does of a real group."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank, self.ranks, self.world_size = rank, list(job.ranks), job.world_size
        self.timeout, self.store, self.alive, self.store_host = job.timeout, job.store, job.alive, job.host
        self._job = job
        self.since = self.time()
        self.calls = 0

    def time(self) -> float:
        """Time of day by the clock of this rank's host."""
        return BEGIN + self._job.clock.now + self._job.clock_offsets.get(self.rank, 0.0)

    def monotonic(self) -> float:
        """Seconds of the simulation."""
        return self._job.clock.now

    def sleep(self, seconds: float) -> None:
        """Wait, unless the rank dies or stops meanwhile."""
        self._job.clock.sleep(seconds)
        if self._job.has_ended(self.rank) or self._job.has_stopped(self.rank):
            raise Gone

    def call(self, function: Callable[[], Any]) -> Call:
        """Begin a call, and count it; none ends while the host of the store stands still."""
        self.calls += 1
        return Call(self, function, math.inf if self._job.has_stopped(self._job.host) else self._delay)

    @property
    def _delay(self) -> float:
        return self._job.delay.get(self.rank, 0.0)

    def is_closed(self, rank: int) -> bool:
        """Whether the connection to a rank is closed by it, or by the system; not if this rank has closed it."""
        job = self._job
        if self.rank in job.closed:
            return False
        is_dead = job.clock.now >= job.dies.get(rank, math.inf) + job.closes_late.get(rank, 0.0)
        return is_dead or rank in job.closed

    def close_connections(self) -> None:
        """Close the connections to all ranks."""
        self._job.closed.add(self.rank)


class Call:
    """A call that takes some seconds of the simulation."""

    def __init__(self, view: View, function: Callable[[], Any], seconds: float) -> None:
        self.results: list[Any] = []
        self._view, self._function, self._seconds = view, function, seconds

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, so long at most."""
        if self._seconds > seconds:
            self._seconds -= seconds
            self._view.sleep(seconds)
            return False
        if self._seconds:
            self._view.sleep(self._seconds)
        with suppress(Exception):
            self.results.append(self._function())
        return True
