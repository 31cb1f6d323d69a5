"""After a collective failed: find out which ranks died or stopped, so that all survivors raise the same text.

The survivors talk through the store of the process group, which a healthy group never touches. A rank on which a
collective fails writes to the store that it is alive. It then closes its connections, so that ranks that wait for it
fail at once. A rank that has waited for long reads the store now and then. A rank that writes nothing is missing: it
died if its connections are closed, else it does not answer.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardckpt.errors import format_many, listed
from shardckpt.tensors.torch_private import group_store, group_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

#: Seconds between two reads of the store by a rank that waits in a collective. A faster collective reads it never.
POLL_INTERVAL = 0.5
#: Seconds between two reads of the store by a rank that knows of the failure.
_DIAGNOSIS_POLL_INTERVAL = 0.02
#: Seconds by which the clocks of hosts may differ. Older entries of a rank are about another failure.
_CLOCK_SKEW = 10.0
#: When this process first used each group. Older entries in a store are of an earlier group with the same name.
_first_use: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
#: Tag of receives that only test a connection; no message is ever sent with it.
_PROBE_TAG = 0x5C4B
_DIAGNOSIS_KEY = "diagnosis"


class Deadlines(NamedTuple):
    """Seconds after which a diagnosis goes on without the ranks that have not answered.

    Attributes:
        survivors: For a rank whose connection is open to write that it is alive. More than POLL_INTERVAL, because a
            waiting rank learns of the failure only when it polls.
        closed: The same for a rank whose connection is closed. Most often it died. But gloo closes the connections of
            a rank that times out before that rank knows.
        readers: For the other survivors to read the diagnosis before the store's process may end.
        store: For the store or gloo to answer: the store's host may have died, or its process may be stopped.
        closing: For the system to close the connections of ranks that die together.
    """

    survivors: float
    closed: float
    readers: float
    store: float
    closing: float

    @classmethod
    def of(cls, timeout: float) -> Deadlines:
        """Return the deadlines of a group with such a timeout, in seconds.

        A loaded node answers late, and a fixed second would name ranks that are alive. Who gives a group ten minutes
        expects such nodes, and does not mind half a minute more before a rank is said not to answer. A death is seen
        earlier: only ``closed`` and ``closing`` delay its diagnosis. In groups of up to 20 s every limit has its least
        value. No limit grows for groups of more than 20 minutes: a job that waits for a day need not wait for an hour
        more.
        """
        patience = min(max(timeout / 20, 1.0), 60.0)
        closed = max(patience / 10, 1.0)
        return cls(survivors=patience, closed=closed, readers=0.4 * patience, store=0.5 * patience, closing=closed / 10)


class Diagnosis(NamedTuple):
    """The report of all survivors: the event, the ranks that it struck, and advice.

    ``missing`` are the ranks that died or did not answer, by their numbers in the whole job.
    """

    text: str
    missing: tuple[int, ...] = ()


class Call(Generic[_T]):
    """A call that runs in a thread, because calls of the store and of gloo cannot be interrupted.

    ``results`` has its result; it is empty if the call failed or has not ended.
    """

    def __init__(self, function: Callable[[], _T]) -> None:
        self.results: list[_T] = []

        def run() -> None:
            with suppress(Exception):
                self.results.append(function())

        self._thread = Thread(target=run, name="shardckpt-failure", daemon=True)
        self._thread.start()

    def ends_within(self, seconds: float) -> bool:
        """Wait for its end, so long at most; return whether it has ended. One that takes longer is left behind."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


class GroupView:
    """A diagnosis's view of a process group, of the system and of the time; tests have a simulated one.

    Args:
        group: The process group, which moves CPU tensors; one that was destroyed is a ValueError.

    Attributes:
        rank: This process's number in the whole job.
        ranks: The group's ranks, by these numbers.
        world_size: The number of ranks in the whole job.
        since: When this process first used the group, by :meth:`time`.
        store: The store through which the group's ranks met.
        alive: The same of the whole job: a rank that is busy with the failure of a smaller group is alive in larger
            ones, too.
        store_host: The rank whose process hosts the store; None if no rank does, or if it cannot be known.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.rank = dist.get_rank()
        self.ranks = dist.get_process_group_ranks(group)
        self.world_size = dist.get_world_size()
        self.since = _first_use.get(group, 0.0)
        self.store = group_store(group, "shardckpt")
        self.alive = group_store(dist.group.WORLD, "shardckpt-alive")
        self.store_host = _find_store_host(self.store)

    @property
    def timeout(self) -> float:
        """Seconds after which the group's collectives fail."""
        return group_timeout(self._group).total_seconds()

    def time(self) -> float:
        """Return this host's time of day, which other ranks compare with theirs."""
        return time.time()

    def monotonic(self) -> float:
        """Return the seconds since some moment."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def call(self, function: Callable[[], _T]) -> Call[_T]:
        """Start a call of the store or of gloo, which may never end."""
        return Call(function)

    def is_closed(self, rank: int) -> bool:
        """Return whether a rank has closed its connection to this one, or the system did so when it died."""
        return self._probe(rank) is None

    def close_connections(self) -> None:
        """Close all connections of the group.

        A receive that times out is the only way: gloo closes every connection of the group then.
        """
        for rank in self.ranks:
            work = None if rank == self.rank else self._probe(rank)
            if work:
                with suppress(RuntimeError):
                    work.wait(dt.timedelta(milliseconds=1))
                return

    def _probe(self, rank: int) -> Any:
        """Start a receive without a sender, to test the connection to a rank.

        Returns the receive; None where that rank closed the connection; False where this rank did, or without gloo.
        """
        if not moves_by_gloo(self._group):
            return False
        try:
            return dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), rank, self._group, _PROBE_TAG)
        except RuntimeError as exc:
            return False if "timeout" in str(exc) else None


class GroupFailure:
    """The failure of a collective, or a collective that takes long and may have failed elsewhere."""

    def __init__(self, view: GroupView) -> None:
        self._view = view
        #: None once it has not answered: each further question would wait for the timeout again.
        self._store = view.store
        #: A question of :meth:`is_announced` that the store has not answered yet.
        self._poll: Call[bool] | None = None
        self._others = [rank for rank in view.ranks if rank != view.rank]

    def is_announced(self) -> bool:
        """Return whether another rank has announced that a collective of this group failed.

        Where the store answers late, the next call waits for the same answer.
        """
        if self._store is None:
            return False
        store, since = self._store, self._view.since
        try:
            poll = self._poll or self._view.call(
                lambda: store.check(["failed"]) and float(store.get("failed")) >= since
            )
        except (RuntimeError, MemoryError):  # this process can start no thread now: that is no failure of the group
            return False
        if not poll.ends_within(POLL_INTERVAL):
            self._poll = poll
            return False
        self._poll = None
        if not poll.results:  # it failed
            self._store = None
        return poll.results == [True]

    def diagnose(self, error: Exception, phase: str) -> Diagnosis:
        """Collective: the ranks that are alive find out which ranks are missing, in less than 2 s if all others answer.

        Returns the diagnosis, the same on all survivors while the store answers. A rank that does not answer takes up
        to a tenth of the group's timeout, if that is more: see :class:`Deadlines`. It closes the connections of the
        group, so that nothing of the failed collective arrives later.
        """
        begun, limits = self._view.monotonic(), self._deadlines
        timed_out = "timed out" in str(error).lower()
        # The order of probing and announcing matters: other survivors close their connections once they know.
        if timed_out:
            self._announce()  # first: gloo has closed this rank's connections, so the others see it as dead already
            closed = first_closed = self._find_closed_connections()
        else:
            first_closed = self._find_closed_connections()  # first: only dead ranks have closed theirs
            self._announce()
            self._view.sleep(limits.closing)
            closed = self._find_closed_connections()
        self._close_connections()
        while (found := self._ask(self._read_diagnosis)) is None and self._store is not None:
            silent = self._find_silent_ranks()
            if self._store is None:
                break
            died = [rank for rank in silent if rank in closed]
            # A death explains the failure: other silent ranks may be busy and not have entered the collective yet.
            explained = died and not timed_out
            limit = limits.closed if explained else limits.survivors
            if not silent or self._view.monotonic() > begun + limit:
                stopped = [] if explained else [rank for rank in silent if rank not in closed]
                found = self._publish(self._describe(died, stopped, error, phase))
                break
            self._view.sleep(_DIAGNOSIS_POLL_INTERVAL)
        if found is None:
            return self._describe_without_store(first_closed, error, phase, timed_out=timed_out)
        self._wait_for_readers(found, limits.readers)
        return found

    def abandon(self, diagnosis: Diagnosis) -> Diagnosis:
        """Leave the group because another group failed; ranks that wait for this one in the group raise the same.

        It returns the other group's ``diagnosis``, or the one that another rank has published before.
        """
        limits = self._deadlines
        # Published before it is announced: a rank that hears of the failure finds the reason in the store.
        published = self._publish(diagnosis)
        self._announce()
        self._close_connections()
        self._wait_for_readers(published, limits.survivors + limits.readers)
        return published

    @property
    def _deadlines(self) -> Deadlines:
        return Deadlines.of(self._view.timeout)

    def _announce(self) -> None:
        """Write to the store that this rank is alive and that a collective failed."""

        def announce(store: Any) -> None:
            now = str(self._view.time()).encode()
            self._view.alive.set(str(self._view.rank), now)
            store.set("failed", now)

        self._ask(announce)

    def _publish(self, diagnosis: Diagnosis) -> Diagnosis:
        """Publish a diagnosis unless another rank has, and return the published one: the first counts for all."""

        def publish(store: Any) -> Diagnosis | None:
            before = store.get(_DIAGNOSIS_KEY).decode() if store.check([_DIAGNOSIS_KEY]) else ""
            if self._read_diagnosis(store) is None:  # none yet, or one of an earlier group
                # One atomic step: of several survivors that publish at the same time, one wins.
                store.compare_set(_DIAGNOSIS_KEY, before, json.dumps((self._view.time(), *diagnosis)))
            return self._read_diagnosis(store)

        return self._ask(publish) or diagnosis

    def _read_diagnosis(self, store: Any) -> Diagnosis | None:
        """Return the diagnosis that a survivor has published, or None."""
        if not store.check([_DIAGNOSIS_KEY]):
            return None
        written_at, text, missing = json.loads(store.get(_DIAGNOSIS_KEY))
        return Diagnosis(text, tuple(missing)) if written_at >= self._view.since else None

    def _find_silent_ranks(self) -> list[int]:
        """Return the other ranks that have not written that they are alive."""
        # Ranks notice the same failure within one group timeout: older entries are about another failure.
        since, alive = self._view.time() - self._view.timeout - _CLOCK_SKEW, self._view.alive

        def is_silent(rank: int) -> bool:
            key = str(rank)
            return not alive.check([key]) or float(alive.get(key)) < since

        found = self._ask(lambda _: list(filter(is_silent, self._others)))
        return self._others if found is None else found

    def _wait_for_readers(self, diagnosis: Diagnosis, seconds: float) -> None:
        """If this process hosts the store, keep it until the survivors have read the diagnosis, so long at most."""
        view = self._view
        ends = view.monotonic() + seconds
        self._ask(lambda store: store.set(f"read/{view.rank}", b"1"))
        readers = [f"read/{rank}" for rank in view.ranks if rank not in diagnosis.missing]
        while view.rank == view.store_host and view.monotonic() < ends and self._store is not None:
            if self._ask(lambda store: store.check(readers)):
                break
            view.sleep(_DIAGNOSIS_POLL_INTERVAL)

    def _describe(self, died: list[int], stopped: list[int], error: Exception, phase: str) -> Diagnosis:
        """Return the diagnosis that names the ranks that died and the ranks that do not answer."""
        where = f"a collective of {format_many(len(self._view.ranks), 'rank')} failed in {phase!r}"
        if not died and not stopped:
            return Diagnosis(
                f"{where}, and none of them is missing: a connection broke, or the call was wrong ({error})"
            )
        texts = []
        if died:
            texts.append(
                f"{self._name_ranks(died)} died or left the process group: {where}, and connections were closed. Look "
                "in the logs of the program and of the kernel (dmesg) for an exception, a signal, or too little "
                "memory; a rank that ended without one has not made this call, which all ranks make"
            )
        if stopped:
            texts.append(
                f"{self._name_ranks(stopped)} did not answer within {self._view.timeout:g} s: "
                f"{where}. Check with py-spy whether the process is stopped, hangs, or was busy for longer than the "
                "process group's timeout"
            )
        return Diagnosis("; ".join(texts), (*died, *stopped))

    def _describe_without_store(self, closed: list[int], error: Exception, phase: str, *, timed_out: bool) -> Diagnosis:
        """Return the diagnosis of this rank alone: the store most often died with the rank that hosts it."""
        host = self._view.store_host
        if host in self._others and (timed_out or host in closed):
            suspects = [host]
        elif len(self._others) == 1 or not closed:
            suspects = self._others
        else:
            suspects = closed
        died, stopped = (suspects, []) if set(suspects) <= set(closed) else ([], suspects)
        found = self._describe(died, stopped, error, phase)
        store = "the process group's store" + ("" if host is None else f", which rank {host} hosts,")
        return Diagnosis(
            f"{found.text} ({store} does not answer either: compare the errors of other ranks)", found.missing
        )

    def _name_ranks(self, ranks: list[int]) -> str:
        """Return "rank 3" or "ranks 1, 3", with the ranks of the group where it is not the whole job."""
        text = ("rank " if len(ranks) == 1 else "ranks ") + listed([*map(str, ranks)])
        if self._view.ranks == list(range(self._view.world_size)):
            return text
        return f"{text} (of the group of ranks {listed([*map(str, self._view.ranks)])})"

    def _find_closed_connections(self) -> list[int]:
        """Return the ranks whose connection to this one is closed: by them, or by the system when they died."""
        return self._run(lambda: [rank for rank in self._others if self._view.is_closed(rank)]) or []

    def _close_connections(self) -> None:
        self._run(self._view.close_connections)

    def _ask(self, question: Callable[[Any], _T]) -> _T | None:
        """Return the result of a function of the store, or None if the store does not answer."""
        if self._store is None:
            return None
        answers = self._run(lambda: [question(self._store)])  # a list: the result may be None
        if answers is None:
            self._store = None
            return None
        return answers[0]

    def _run(self, function: Callable[[], _T]) -> _T | None:
        """Return the function's result, or None if it fails or takes longer than the store may."""
        call = self._view.call(function)
        call.ends_within(self._deadlines.store)
        return call.results[0] if call.results else None


def record_first_use(group: Any) -> None:
    """Remember when this process first used a group."""
    _first_use.setdefault(group, time.time())


def moves_by_gloo(group: Any) -> bool:
    """Return whether gloo moves the group's CPU tensors."""
    return "cpu:gloo" in str(dist.get_backend_config(group))


def wait_for(work: Any, seconds: float) -> bool:
    """Wait ``seconds`` for a work handle of gloo, and return whether it is done; if not, it continues.

    One that failed is a RuntimeError.
    """
    try:
        work.wait(dt.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have ended between the two calls: raise only its own error
    return True


def _find_store_host(store: Any) -> int | None:
    """Return the rank whose process hosts the store; None if no rank does, or if it cannot be known."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's own process hosts it
    return 0 if isinstance(store, dist.TCPStore) and not by_agent else None
