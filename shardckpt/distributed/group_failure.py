"""After a collective failed: which ranks died or stopped. All survivors find the same ranks, and raise the same text.

They use the store of the process group, which a healthy group never touches. A rank on which a collective fails writes
to the store that it is alive, and closes its connections, so that ranks that wait for it fail at once. A rank that
waits for long reads the store now and then. A rank that writes nothing is missing: it died if its connections are
closed; else it does not answer.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from shardckpt.tensors import group_store, group_timeout

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

#: Seconds between two looks at the store by a rank that waits. A collective that is quicker costs none.
LOOK_INTERVAL = 0.5
#: Seconds in which the survivors must have said that they are alive: they look now and then, and gloo closes the
#: connections of a rank that times out before that rank hears of it.
_PATIENCE = 1.0
#: Seconds for the others to read the diagnosis.
_LINGER = 0.4
#: Seconds for connections of ranks that die together to close.
_GRACE = 0.1
#: Seconds for the store to answer: it may be on a host that died, or in a process that is stopped.
_STORE_PATIENCE = 0.5
#: Seconds by which the clocks of hosts may differ. What a rank said longer ago was about another failure.
_SKEW = 10.0
#: Seconds between two looks of a rank that knows of the failure.
_PAUSE = 0.02
#: When this process first used each group: what was said before is of an earlier group with the same store and name.
_first_used: WeakKeyDictionary[Any, float] = WeakKeyDictionary()
#: Of receives that only ask whether there is a connection.
_TAG = 0x5C4B
_DIAGNOSIS = "diagnosis"


class Diagnosis(NamedTuple):
    """What the survivors agree on.

    Attributes:
        text: What happened, to which ranks, and what to look for.
        missing: The ranks that died or did not answer, as the whole job numbers them.
    """

    text: str
    missing: tuple[int, ...] = ()


class GroupFailure:
    """The failure of a collective, or what looks like one: a collective that takes long.

    Args:
        group: The process group, which moves CPU tensors.

    Raises:
        ValueError: the group was destroyed.
    """

    def __init__(self, group: Any) -> None:
        #: None as soon as it does not answer: each further question would take as long.
        self._store = group_store(group, "shardckpt")
        #: Of the whole job: a rank that is busy with the failure of a smaller group is alive in larger ones, too.
        self._alive = group_store(dist.group.WORLD, "shardckpt-alive")
        self._host = _host_of(self._store)
        self._group = group
        self._rank = dist.get_rank()
        self._ranks = dist.get_process_group_ranks(group)
        self._others = [rank for rank in self._ranks if rank != self._rank]
        self._since = _first_used.get(group, 0.0)

    def is_announced(self) -> bool:
        """Whether another rank has said that a collective of this group failed."""
        return bool(self._ask(lambda store: store.check(["failed"]) and float(store.get("failed")) >= self._since))

    def diagnose(self, error: Exception, phase: str) -> Diagnosis:
        """Collective: the ranks that are alive find out which ranks are missing, in less than 2 s.

        It closes the connections of the group, so that nothing of the failed collective arrives later.

        Args:
            error: What the collective raised on this rank.
            phase: What this rank was doing, for the text.

        Returns:
            What all survivors report.
        """
        begun = time.monotonic()
        timed_out = "timed out" in str(error).lower()
        if timed_out:
            self._announce()  # at once: gloo has closed the connections, and others see that
            closed = first_closed = self._closed_connections()
        else:
            first_closed = self._closed_connections()  # before other survivors close theirs
            self._announce()
            time.sleep(_GRACE)
            closed = self._closed_connections()
        self._close_connections()
        while (found := self._ask(self._agreed)) is None and self._store is not None:
            silent = self._silent()
            if self._store is None:
                break
            died = [rank for rank in silent if rank in closed]
            known = died and not timed_out
            patience = _PATIENCE if known or timed_out else _PATIENCE + 2 * _GRACE
            if not silent or time.monotonic() > begun + patience:
                mute = [] if known else [rank for rank in silent if rank not in closed]
                found = self._agree(self._describe(died, mute, error, phase))
                break
            time.sleep(_PAUSE)
        if found is None:
            return self._describe_without_store(first_closed, error, phase, timed_out=timed_out)
        self._let_others_read(found, begun + _PATIENCE + _LINGER)
        return found

    def abandon(self, diagnosis: Diagnosis) -> Diagnosis:
        """Leave the group because another group failed; ranks that wait for this one in the group raise the same.

        Args:
            diagnosis: Of the group that failed.

        Returns:
            It, or the one that another rank has published before.
        """
        ends = time.monotonic() + _PATIENCE + _LINGER
        agreed = self._agree(diagnosis)
        self._announce()
        self._close_connections()
        self._let_others_read(agreed, ends)
        return agreed

    def _announce(self) -> None:
        def announce(store: Any) -> None:
            now = str(time.time()).encode()
            self._alive.set(str(self._rank), now)
            store.set("failed", now)

        self._ask(announce)

    def _agree(self, diagnosis: Diagnosis) -> Diagnosis:
        """Publish a diagnosis, unless another rank has: the first one counts for all."""

        def agree(store: Any) -> Diagnosis | None:
            before = store.get(_DIAGNOSIS).decode() if store.check([_DIAGNOSIS]) else ""
            if self._agreed(store) is None:  # there is none yet, or that of an earlier group
                store.compare_set(_DIAGNOSIS, before, json.dumps((time.time(), *diagnosis)))
            return self._agreed(store)

        return self._ask(agree) or diagnosis

    def _agreed(self, store: Any) -> Diagnosis | None:
        """The diagnosis that a survivor has published; None if none has."""
        if not store.check([_DIAGNOSIS]):
            return None
        said, text, missing = json.loads(store.get(_DIAGNOSIS))
        return Diagnosis(text, tuple(missing)) if said >= self._since else None

    def _silent(self) -> list[int]:
        """The other ranks that have not written that they are alive."""
        since = time.time() - group_timeout(self._group).total_seconds() - _SKEW

        def is_silent(rank: int) -> bool:
            key = str(rank)
            return not self._alive.check([key]) or float(self._alive.get(key)) < since

        found = self._ask(lambda _: list(filter(is_silent, self._others)))
        return self._others if found is None else found

    def _let_others_read(self, diagnosis: Diagnosis, ends: float) -> None:
        """If this process hosts the store, keep it until the survivors have read the diagnosis, or for a moment."""
        self._ask(lambda store: store.set(f"read/{self._rank}", b"1"))
        readers = [f"read/{rank}" for rank in self._ranks if rank not in diagnosis.missing]
        while self._rank == self._host and time.monotonic() < ends and self._store is not None:
            if self._ask(lambda store: store.check(readers)):
                break
            time.sleep(_PAUSE)

    def _describe(self, died: list[int], mute: list[int], error: Exception, phase: str) -> Diagnosis:
        where = f"a collective of {len(self._ranks)} ranks failed in {phase!r}"
        if not died and not mute:
            return Diagnosis(
                f"{where}, and none of them is missing: a connection broke, or the call was wrong ({error})"
            )
        texts = []
        if died:
            texts.append(
                f"{self._named(died)} died or left the process group: {where}, and connections were closed. Look in "
                "the logs of the program and of the kernel (dmesg) for an exception, a signal, or too little memory"
            )
        if mute:
            texts.append(
                f"{self._named(mute)} did not answer within {group_timeout(self._group).total_seconds():g} s: {where}. "
                "Check with py-spy whether the process is stopped, hangs, or was busy for longer than the process "
                "group's timeout"
            )
        return Diagnosis("; ".join(texts), (*died, *mute))

    def _describe_without_store(self, closed: list[int], error: Exception, phase: str, *, timed_out: bool) -> Diagnosis:
        """What this rank can tell without the store, which most often died with the rank that hosts it."""
        if self._host in self._others and (timed_out or self._host in closed):
            suspects = [self._host]
        elif len(self._others) == 1 or not closed:
            suspects = self._others
        else:
            suspects = closed
        died, mute = (suspects, []) if set(suspects) <= set(closed) else ([], suspects)
        found = self._describe(died, mute, error, phase)
        store = "the process group's store" + ("" if self._host is None else f", which rank {self._host} hosts,")
        return Diagnosis(
            f"{found.text} ({store} does not answer either: compare the errors of other ranks)", found.missing
        )

    def _named(self, ranks: list[int]) -> str:
        text = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
        if self._ranks == list(range(dist.get_world_size())):
            return text
        return f"{text} (of the group of ranks {', '.join(map(str, self._ranks))})"

    def _closed_connections(self) -> list[int]:
        """The ranks whose connections to this one they have closed, or the system when they died."""

        def look() -> list[int]:
            return [rank for rank in self._others if self._receive_from(rank) is None]

        return _within(_STORE_PATIENCE, look) or []

    def _close_connections(self) -> None:
        """Close all: gloo does where a receive takes longer than it may, and has no other way."""

        def close() -> None:
            for rank in self._others:
                work = self._receive_from(rank)
                if work:
                    with suppress(RuntimeError):
                        work.wait(dt.timedelta(milliseconds=1))
                    return

        if moves_by_gloo(self._group):
            _within(_STORE_PATIENCE, close)

    def _receive_from(self, rank: int) -> Any:
        """A receive of what nobody sends; None where that rank closed the connection, False where this one did."""
        if not moves_by_gloo(self._group):
            return False
        try:
            return dist.irecv(torch.empty(1, dtype=torch.uint8, device="cpu"), rank, self._group, _TAG)
        except RuntimeError as exc:
            return False if "timeout" in str(exc) else None

    def _ask(self, question: Callable[[Any], _T]) -> _T | None:
        """What the store says, or None if it does not answer."""
        if self._store is None:
            return None
        answers = _within(_STORE_PATIENCE, lambda: [question(self._store)])
        if answers is None:
            self._store = None
            return None
        return answers[0]


def note_use(group: Any) -> None:
    """Remember when this process first used a group."""
    _first_used.setdefault(group, time.time())


def moves_by_gloo(group: Any) -> bool:
    """Whether gloo moves the group's CPU tensors."""
    return "cpu:gloo" in str(dist.get_backend_config(group))


def is_done(work: Any, seconds: float) -> bool:
    """Wait for a collective of gloo; one that is not done by then goes on.

    Args:
        work: The collective, begun with ``async_op=True``.
        seconds: How long to wait.

    Returns:
        Whether it is done.

    Raises:
        RuntimeError: it failed.
    """
    try:
        work.wait(dt.timedelta(seconds=seconds))
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it may have ended just now
    return True


def _host_of(store: Any) -> int | None:
    """The rank whose process hosts the store; None if none does, as far as can be known."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return 0 if isinstance(store, dist.TCPStore) and not by_agent else None  # type: ignore[attr-defined]


def _within(seconds: float, function: Callable[[], _T]) -> _T | None:
    """The function's result, or None if it fails or takes longer; its thread is not waited for then."""
    results: list[_T] = []

    def run() -> None:
        with suppress(Exception):
            results.append(function())

    thread = Thread(target=run, name="shardckpt-failure", daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


__all__ = ["LOOK_INTERVAL", "Diagnosis", "GroupFailure", "is_done", "moves_by_gloo", "note_use"]
