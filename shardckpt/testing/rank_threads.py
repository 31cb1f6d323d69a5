"""Ranks as threads of this process: groups that are formed in a millisecond, for tests of agreements between ranks.

torch's threaded process group moves the data of collectives. The rest is here: sends and receives, and an end to the
wait for a rank that never comes. All private names of torch that this needs are in this file.
"""

# ruff: noqa: SLF001 - torch has no public names for this

from __future__ import annotations

import copy
import sys
import threading
import time
import traceback
from collections import defaultdict, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

from shardckpt.testing.ranks import RUN_TIMEOUT, RankError, RankFailure, Ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_BACKEND = "shardckpt_threads"
#: torch's module, which is not typed.
_torch: Any = multi_threaded_pg
#: torch keeps the state of process groups in one variable, so runs take turns.
_turn = threading.Lock()


class RankThreads(Ranks):
    """Ranks that are threads of this process: groups of any size, without a start; nothing is left to close.

    Ranks take turns: one runs until it waits for others, so a test is the same each time. Threads that ranks start run
    next to them. A rank that ends while others wait for it is named at once; so are collectives that do not match, and
    a job all of whose ranks wait. A rank that waits for another in any other way, for an event or a file, never gets
    it. Arguments are copied for each rank (``copy.deepcopy``); results are not, and the function may be a closure.

    Ranks share the process: its environment, current directory, random generators, patches, caches and budgets. Tests
    of those, of deaths, signals and deadlines, need processes: :class:`shardckpt.testing.RankPool`. Not supported:
    ``dist.reduce``, ``dist.monitored_barrier``, receives from any rank.

    Example:
        ::

            def test_gather():
                assert RankThreads().run(3, lambda: Comm().all_gather(dist.get_rank())) == [[0, 1, 2]] * 3
    """

    def outcomes(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Run a function as :meth:`run` does; return the exception of a rank as a :class:`RankFailure`.

        Raises:
            ValueError: ``world_size`` is less than 1.
            RankError: a rank did not end in time, or called this method itself.
        """
        if world_size < 1:
            raise ValueError(f"a group has at least one rank, not {world_size}")
        if _rank() is not None:
            raise RankError("a rank that is a thread cannot run ranks of its own")
        with _turn, _groups_by_thread():
            job = _Job(world_size)
            ranks = [_Rank(job, number, function, copy.deepcopy(args)) for number in range(world_size)]
            ends = time.monotonic() + timeout
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join(max(0.0, ends - time.monotonic()))
            if left := [rank.number for rank in ranks if rank.is_alive()]:
                job.stop(f"ranks {left} of {world_size} did not end within {timeout} s: {job.describe_turn()}")
                raise RankError(job.reason)
        return [rank.outcome for rank in ranks]


class _Rank(threading.Thread):
    """A rank: its function, its process groups, and its result."""

    def __init__(self, job: _Job, number: int, function: Any, args: Any) -> None:
        super().__init__(name=f"rank {number}", daemon=True)
        self.job = job
        self.number = number
        self.outcome: Any = None
        self.groups: Any = None
        self._call: Callable[[], Any] = lambda: function(*args)

    def run(self) -> None:
        """Call the function in a group of all ranks."""
        self.job.begin(self)
        make_groups: Any = _torch.ThreadLocalWorld()._get_world
        self.groups = make_groups()  # new: this thread has none yet
        try:
            dist.init_process_group(_BACKEND, store=self.job.store, rank=self.number, world_size=self.job.size)
            try:
                self.outcome = self._call()
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException as exc:  # noqa: BLE001 - the test decides
            self.outcome = RankFailure(type(exc).__name__, str(exc), traceback.format_exc())
        finally:
            self.job.leave(self)


class _Wait(NamedTuple):
    """The collective or message that a thread waits for."""

    rank: _Rank
    where: str
    is_over: Callable[[], bool]
    #: Returns the ranks without which it is not over.
    awaited: Callable[[], list[int]]


class _Job:
    """The ranks of a run: where they meet for collectives, and the messages that they have sent.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.store = dist.HashStore()
        #: Why no thread waits any longer.
        self.reason = ""
        self._changed = threading.Condition()
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._messages: defaultdict[tuple[str, int, int, int], deque[torch.Tensor]] = defaultdict(deque)
        #: The rank that runs: no other continues until it waits.
        self._turn: int | None = 0
        #: Ranks that wait for their turn, or will: they have not begun.
        self._ready = set(range(size))
        #: The fates of ranks that have ended.
        self._left: dict[int, str] = {}
        self._waits: dict[threading.Thread, _Wait] = {}

    def meet(self, group: Any, number: int, collective: Any, data: Any) -> None:
        """Collective: wait for all ranks of a group at its collective of a number; the last one moves the data."""
        name = _describe(collective)
        members = dist.get_process_group_ranks(group)
        with self._changed:
            if self.reason:
                raise RuntimeError(self.reason)
            meeting = self._meetings.setdefault((group.pg_name, number), _Meeting(collective))
            if _describe(meeting.collective) != name:
                others = ", ".join(str(members[place]) for place in sorted(meeting.data))
                self.stop(f"rank {_rank().number} calls {name}, rank {others} {_describe(meeting.collective)}")
                raise RuntimeError(self.reason)
            meeting.data[group.rank()] = data
            if len(meeting.data) == len(members):
                del self._meetings[group.pg_name, number]
                meeting.move_data()
                self._changed.notify_all()
            self._wait(
                f"in {name}",
                lambda: meeting.is_over,
                lambda: [rank for place, rank in enumerate(members) if place not in meeting.data],
            )
        if meeting.error is not None:
            raise RuntimeError(f"{name} failed: {meeting.error}") from meeting.error

    def send(self, key: tuple[str, int, int, int], tensor: torch.Tensor) -> None:
        """Leave a copy of a tensor for another rank."""
        with self._changed:
            self._messages[key].append(tensor.detach().clone())
            self._changed.notify_all()

    def receive(self, key: tuple[str, int, int, int], sender: int, tensor: torch.Tensor) -> None:
        """Wait for a message of another rank, and copy it."""
        with self._changed:
            self._wait(f"for a message of rank {sender}", lambda: bool(self._messages[key]), lambda: [sender])
            tensor.detach().copy_(self._messages[key].popleft())

    def begin(self, rank: _Rank) -> None:
        """Wait for the first turn of a rank."""
        with self._changed:
            self._take_turn(rank)

    def leave(self, rank: _Rank) -> None:
        """Say that a rank has ended, and comes to no collective any more."""
        with self._changed:
            failed = isinstance(rank.outcome, RankFailure)
            self._left[rank.number] = f"has raised {rank.outcome.kind}" if failed else "has ended"
            self._pass_turn(rank)
            self._changed.notify_all()

    def stop(self, reason: str) -> None:
        """End all waits."""
        with self._changed:
            self.reason = self.reason or reason
            self._changed.notify_all()

    def describe_turn(self) -> str:
        """Describe the state of each rank."""
        with self._changed:
            return "; ".join([f"rank {self._turn} runs", *self._describe_waits()])

    def _describe_waits(self) -> list[str]:
        return sorted(f"rank {wait.rank.number} waits {wait.where}" for wait in self._waits.values())

    def _wait(self, where: str, is_over: Callable[[], bool], awaited: Callable[[], list[int]]) -> None:
        """Wait; raise as soon as it cannot come any more."""
        thread, rank = threading.current_thread(), _rank()
        self._waits[thread] = _Wait(rank, where, is_over, awaited)
        try:
            while not is_over():
                gone = self._left.keys() & awaited()
                if not self.reason and self._is_stuck():
                    self.stop("; ".join(["no rank can go on", *self._describe_waits()]))
                if self.reason or gone:
                    ended = gone and f"rank {min(gone)} {self._left[min(gone)]}, and rank {rank.number} waits {where}"
                    raise RuntimeError(self.reason or ended)
                self._pass_turn(rank)
                self._changed.wait()
        finally:
            if isinstance(thread, _Rank):
                self._take_turn(thread)
            del self._waits[thread]

    def _take_turn(self, rank: _Rank) -> None:
        """Wait until no other rank runs."""
        self._ready.add(rank.number)
        while self._turn not in (None, rank.number):
            self._changed.wait()
        self._turn = rank.number
        self._ready.remove(rank.number)

    def _pass_turn(self, rank: _Rank) -> None:
        """Let the next rank run that can: this one waits, or a thread of it, for whose end it may wait."""
        if self._turn == rank.number:
            over = {wait.rank.number for thread, wait in self._waits.items() if thread is wait.rank and wait.is_over()}
            following = sorted(self._ready | over, key=lambda other: (other - rank.number - 1) % self.size)
            self._turn = following[0] if following else None
            self._changed.notify_all()

    def _is_stuck(self) -> bool:
        """Return whether there is a deadlock: each thread of each rank waits for another of them."""
        if any(wait.is_over() or self._left.keys() & wait.awaited() for wait in self._waits.values()):
            return False  # one that has not yet woken up
        ranks = {thread: _find_rank(thread) for thread in threading.enumerate()}
        threads = {thread: rank.number for thread, rank in ranks.items() if rank is not None and rank.job is self}
        return len(self._left.keys() | set(threads.values())) == self.size and threads.keys() <= self._waits.keys()


class _Meeting:
    """One collective: the data of the ranks, by their place in the group.

    Args:
        collective: torch's object that moves the data.
    """

    def __init__(self, collective: Any) -> None:
        self.collective = collective
        self.data: dict[int, Any] = {}
        self.is_over = False
        self.error: Exception | None = None

    def move_data(self) -> None:
        """Give each rank its result; an error is everyone's."""
        try:
            self.collective.work([self.data[place] for place in range(len(self.data))])
        except Exception as exc:  # noqa: BLE001 - as of tensors that do not fit
            self.error = exc
        self.is_over = True


class _Barrier:
    """The data of a barrier: none. torch's is an all-reduce, which would meet other ranks' all-reduces."""

    def work(self, data: list[Any]) -> None:
        """Move nothing."""


class _Collective:
    """The meeting point of torch's process group for a collective.

    Args:
        collective: torch's object that moves the data.
        group: The group of this rank.
    """

    def __init__(self, collective: Any, group: _Group) -> None:
        self._collective = collective
        self._group = group

    def join(self, _rank_in_group: int, data: Any) -> Any:
        """Collective: wait for the others, and return a work handle that is done."""
        _rank().job.meet(self._group, self._group.count_collective(), self._collective, data)
        return _torch.ret_work(data)


class _Group(_torch.ProcessLocalGroup):  # type: ignore[misc]
    """torch's group of threads, whose ranks meet in a job, and send and receive."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._collectives = 0

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices of torch's backends: a group in Python has none."""
        return [torch.device("cpu")]

    def _get_backend(self, _device: torch.device) -> Any:
        """Return what carries out its collectives, which torch 2.15 asks for its abilities."""
        return self

    def count_collective(self) -> int:
        """Return the number of this rank's next collective."""
        self._collectives += 1
        return self._collectives

    def barrier(self, opts: Any = None) -> Any:  # noqa: ARG002 - as torch calls it
        """Collective: wait for all."""
        return _Collective(_Barrier(), self).join(self.rank(), None)

    def send(self, tensors: list[torch.Tensor], receiver: int, tag: int = 0) -> Any:
        """Send to one rank, which need not have come."""
        _rank().job.send((self.pg_name, self.rank(), receiver, tag), tensors[0])
        return _torch.ret_work(tensors)

    def recv(self, tensors: list[torch.Tensor], sender: int, tag: int = 0) -> Any:
        """Return a handle; the wait for it receives."""
        return _Receive(self, sender, tag, tensors[0])


class _Receive:
    """A receive that has begun.

    Args:
        group: The group.
        sender: The sender's place in it.
        tag: The sender's.
        tensor: The tensor to fill.
    """

    def __init__(self, group: _Group, sender: int, tag: int, tensor: torch.Tensor) -> None:
        self._key = (group.pg_name, sender, group.rank(), tag)
        self._sender = dist.get_global_rank(group, sender)
        self._tensor = tensor
        self._done = False

    def wait(self, timeout: Any = None) -> bool:  # noqa: ARG002 - as torch calls it
        """Wait for the message, whatever the timeout: a rank that has not ended may send it."""
        if not self._done:
            _rank().job.receive(self._key, self._sender, self._tensor)
            self._done = True
        return True

    def is_completed(self) -> bool:
        """Return whether the message was received."""
        return self._done


class _Groups(_torch.ThreadLocalWorld):  # type: ignore[misc]
    """torch's state of process groups: a rank's own on its threads, and the process's on all others.

    Args:
        others: The process's.
    """

    def __init__(self, others: Any) -> None:
        self._others = others

    def _get_world(self) -> Any:
        rank = _find_rank(threading.current_thread())
        return self._others if rank is None else rank.groups

    @property
    def comms(self) -> list[Any]:
        """Communicators in addition to the groups, which torch 2.11 asks for and its threads lack."""
        return getattr(self._get_world(), "comms", [])


def _find_rank(thread: Any) -> _Rank | None:
    """Return the rank that a thread belongs to, because it is one, or because one has started it."""
    return thread if isinstance(thread, _Rank) else getattr(thread, "shardckpt_rank", None)


def _describe(collective: Any) -> str:
    """Return the name of a collective with the arguments that must be equal on all ranks: a root, an operation."""
    # a ReduceOp has no text of its own, but its kind has; torch 2.15 has a factor, which most have not
    given = {name: value for name, value in vars(collective).items() if value is not None}
    values = ", ".join(f"{name}={getattr(value, 'op', value)}" for name, value in given.items())
    return type(collective).__name__.lstrip("_") + (f"({values})" if values else "")


def _rank() -> Any:
    return _find_rank(threading.current_thread())


@contextmanager
def _groups_by_thread() -> Iterator[None]:
    """Give each rank process groups of its own until the block ends."""
    c10d: Any = dist.distributed_c10d
    c_c10d: Any = torch._C._distributed_c10d
    torch_group: Any = _torch.ProcessLocalGroup
    start, groups, excepthook = threading.Thread.start, c10d._world, sys.excepthook
    collectives = {name: vars(torch_group)[name] for name in ("_start_coll", "_end_coll")}

    def start_with_rank(thread: threading.Thread) -> None:
        thread.shardckpt_rank = _rank()  # type: ignore[attr-defined]
        start(thread)

    threading.Thread.start = start_with_rank  # type: ignore[assignment, method-assign]
    c10d._world = _Groups(groups)
    torch_group._start_coll = staticmethod(_Collective)
    torch_group._end_coll = staticmethod(lambda _collective, _group: None)
    c_c10d._set_thread_isolation_mode(True)  # the groups that DTensor's collectives find by their names
    try:
        yield
    finally:
        c_c10d._set_thread_isolation_mode(False)
        for name, method in collectives.items():
            setattr(torch_group, name, method)
        c10d._world, sys.excepthook = groups, excepthook  # torch wraps the hook at each init_process_group
        threading.Thread.start = start  # type: ignore[method-assign]


# CUDA builds without a GPU: DTensor sets a guard there that is gone with the thread that was first to set it, and
# torch 2.11 crashes in the next one. This thread outlives the ranks.
torch._C._ensureCUDADeviceGuardSet()
_devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
dist.Backend.register_backend(_BACKEND, lambda _store, rank, size, _timeout: _Group(rank, size), devices=_devices)
# torch 2.15 records what each group does, but for groups of these; one in Python has no name where the recorder looks
getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(_BACKEND)
