"""The only file that calls collectives: after each of them all ranks go on, or all raise the same error.

Each collective of :class:`Comm` begins with a small message that says whether a rank has failed ("the ranks sync
errors"). A rank that fails goes to its next sync and finds the others at theirs: all raise, and no rank is left in a
collective that another never enters. What a rank does alone needs no sync of its own: the next collective has one.

Small values go to the main rank, which sends them to all: it hears at once of a rank that dies, and the others hear of
it from the main rank. Of a rank that stops they hear by the group's timeout. Together they find out which rank it is:
see :mod:`shardckpt.distributed.group_failure`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import pickle
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar
from weakref import ref

import torch
import torch.distributed as dist

from shardckpt.distributed.error_report import ErrorReport, copy_error, joint_message
from shardckpt.distributed.group_failure import LOOK_INTERVAL, Diagnosis, GroupFailure, is_done, moves_by_gloo, note_use
from shardckpt.distributed.groups import alive, cpu_group, joined_group, moves
from shardckpt.distributed.pickling import can_be_pickled, unpickled
from shardckpt.errors import CheckpointingException, CommunicationError, RankFailedError
from shardckpt.tensors import packed, view_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: A tensor, and the rank to which it goes or from which it comes.
_Route: TypeAlias = "tuple[torch.Tensor, int]"

#: Bytes that the main rank takes from all ranks in one go, though some of them may be filling.
_AT_ONCE = 16 << 20
#: Bytes of all ranks that the main rank takes, and sends to all: with gloo that is quicker than its ring, in which even
#: a few bytes take a step for each rank. More, as of 10,000 ranks, which are on backends that reduce by trees, do not.
BY_MAIN = 512 << 10
#: Numbers that travel with a sync of errors, at most.
_SYNC_NUMBERS = 6
#: Bytes of a sync of errors.
SYNC_BYTES = 8 * (1 + _SYNC_NUMBERS)
#: The last collectives, which are never freed. A thread of gloo lets go of one just after it has woken who waits. Were
#: it the last to have it, it would free its tensors, and need the interpreter for that, which may be ending: the
#: process would be aborted then ("terminate called without an active exception").
_last_works: deque[Any] = deque(maxlen=4)
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_last_works))
#: Tells the Comms of a process apart.
_numbers = itertools.count()


def _uninterrupted(collective: Callable[Concatenate[Comm, _P], _T]) -> Callable[Concatenate[Comm, _P], _T]:
    """Let Ctrl-C wait until the last message of a collective: the other ranks are on their way to that."""

    @functools.wraps(collective)
    def call(self: Comm, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._depth += 1
        try:
            return collective(self, *args, **kwargs)
        finally:
            self._depth -= 1
            if not self._depth and self._interrupt is not None:
                interrupt, self._interrupt = self._interrupt, None
                raise interrupt

    return call


class Comm:
    """The ranks that save or load together; with no process group, one rank.

    A method whose docstring begins with ``Collective:`` is called by every rank of the group. Two rules keep a job from
    hanging:

    1. Every rank calls the same collectives in the same order, and what can fail on one rank alone stands in a phase.
    2. Between a :meth:`local_phase` and the next collective of the same Comm stands no collective of another Comm or of
       ``torch.distributed``: a rank that failed waits in this Comm. :meth:`sync_errors` is the cheapest collective.

    Right::

        with comm.local_phase("reading the index"):  # no message: the next collective raises its errors on all ranks
            mine = read(path)
        everyone = comm.all_gather(mine)
        with comm.collective_phase("writing files"):  # at its end all ranks have written, or all raise
            write(everyone)

    Wrong: each of these can leave ranks waiting until the group's timeout::

        everyone = comm.all_gather(read(path))  # a rank that cannot read never comes
        if comm.is_main: comm.broadcast(value)  # the other ranks do not call it
        for key in mine: comm.largest(key)  # ranks have different numbers of keys
        with comm.local_phase("writing"): write(mine)
        dist.barrier()  # a rank that could not write waits in comm, the others wait here

    Making a Comm is collective where its group moves no CPU tensors: its ranks make a gloo group once.

    Args:
        process_group: The group, or None for the default one where torch.distributed is initialised.
        alone: This process by itself, whatever groups there are.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        active = not alone and dist.is_available() and dist.is_initialized()
        own = joined_group(process_group) if active else None
        group = cpu_group(own) if active else None
        # weak: an error's traceback may keep this alive, and a job must be able to end its groups all the same
        self._groups = (ref(own), ref(group)) if active else None
        self._by_gloo = active and moves_by_gloo(group)
        if active:
            note_use(group)
        self.rank: int = dist.get_rank(group) if active else 0
        self.world_size: int = dist.get_world_size(group) if active else 1
        self._phase = "start"
        self._number = next(_numbers)
        #: The shared error that this rank is raising: what fails while it is raised is reported to no other rank.
        self._raised: CheckpointingException | None = None
        self._connected: set[str] = set()
        #: Collectives that this rank is in, one in another.
        self._depth = 0
        self._interrupt: BaseException | None = None

    @property
    def _own(self) -> Any:
        """The caller's group."""
        return None if self._groups is None else alive(self._groups[0])

    @property
    def _group(self) -> Any:
        """The group that moves CPU tensors: the caller's, or the gloo group of its ranks."""
        return None if self._groups is None else alive(self._groups[1])

    @property
    def is_main(self) -> bool:
        """Whether this rank speaks for the group."""
        return self.rank == 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the group, as the whole job numbers them."""
        return (0,) if self._group is None else tuple(dist.get_process_group_ranks(self._group))

    @contextmanager
    def collective_phase(self, name: str) -> Iterator[None]:
        """Collective: do a phase; at its end all ranks go on, or all raise the error of the first that failed.

        It is a :meth:`local_phase` that ends with :meth:`sync_errors`. For what later steps take for granted on every
        rank: before a smaller group meets, before an hour of writing, before another library's collectives.

        Args:
            name: What the phase does, for the error: "planning", "writing tensors".

        Raises:
            CheckpointingException: on every rank, if any failed.
        """
        with self.local_phase(name):
            yield
            self.sync_errors()

    @contextmanager
    def local_phase(self, name: str) -> Iterator[None]:
        """Do this rank's part of a phase, without a message; the next collective raises its error on all ranks.

        A rank that fails goes to that collective at once, and raises here what all raise. So what follows on the other
        ranks, up to that collective, is done although a rank may have failed. See :class:`Comm` for what may follow.

        Args:
            name: As in :meth:`collective_phase`.

        Raises:
            CheckpointingException: on this rank if it failed; on the others in their next collective.
        """
        before, self._phase, self._raised = self._phase, name, None
        error: BaseException | None = None
        try:
            yield
        except Exception as exc:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            error = exc
        except BaseException as exc:  # Ctrl-C or an exit: the others hear of it, this rank goes on ending
            with suppress(CheckpointingException):
                self.sync_errors(exc)
            raise
        if error is not None:
            self.sync_errors(error)
        self._phase = before

    @_uninterrupted
    def sync_errors(self, error: BaseException | None = None) -> None:
        """Collective: raise the same error on all ranks if any rank has failed, else go on.

        Args:
            error: What this rank failed with; phases call it with that.

        Raises:
            CheckpointingException: on every rank, if any failed.
        """
        self._sync(error=error)

    def _sync(self, *values: int, error: BaseException | None = None, operation: Any = dist.ReduceOp.MAX) -> list[int]:
        """Collective: sync errors, and combine a few values of all ranks by position, in one message of fixed size."""
        if isinstance(error, CheckpointingException) and error.shared_by == self._number:
            raise error
        if isinstance(error, CommunicationError) and error.shared_by is not None:
            # a rank did not answer a smaller group: to ask it here is to wait as long once more
            raise self._lost(self._abandon(error)) from error
        if error is not None and self._raised is not None:
            if not isinstance(error, Exception):
                raise error
            raise copy_error(self._raised) from error  # again, instead of what has failed since
        self._raised = None
        if self.world_size == 1:
            if error is not None:
                raise self._local(error)
            return list(values)
        padding = [0] * (_SYNC_NUMBERS - len(values))
        failed, *combined = self._combined([int(error is not None), *values, *padding], operation)
        if failed:
            raise self._share_error(error) from error
        return combined[: len(values)]

    def _share_error(self, error: BaseException | None) -> CheckpointingException:
        """Collective: return the one error that all ranks raise, after some have failed.

        It is that of the first rank that failed, with its class if every rank can make that: see :class:`ErrorReport`.
        """
        report = None if error is None else ErrorReport.of(error, f"rank {self.rank}, in {self._phase!r}")
        everyone: list[ErrorReport | None] = self._all_gather_bytes(pickle.dumps(report))
        reports = [report for report in everyone if report is not None]
        shared = reports[0].rebuild(joint_message(reports))
        unknown = self._combined([int(shared is None)], dist.ReduceOp.MAX) != [0]
        if shared is None or unknown:
            shared = RankFailedError(joint_message(reports, named=True))
        shared.shared_by = self._number
        self._raised = copy_error(shared)
        return shared

    @_uninterrupted
    def all_gather(self, value: _T) -> list[_T]:
        """Collective: return every rank's value, in rank order, on every rank; values are picklable."""
        data, longest = self._pickle_and_sync(value)
        return [value] if self.world_size == 1 else self._all_gather_bytes(data, longest)

    def gather(self, value: _T) -> list[_T]:
        """Collective: return every rank's value, in rank order, on the main rank; an empty list on the others."""
        return self.gather_some(value, given=True)

    @_uninterrupted
    def gather_some(self, value: _T, *, given: bool) -> list[_T]:
        """Collective: as :meth:`gather`, of the ranks with ``given=True`` only."""
        data, longest = self._pickle_and_sync(value, given=given)
        if self.world_size == 1:
            return [value] if given else []
        if longest * self.world_size <= _AT_ONCE:
            return self._gathered(data, longest)
        with self.collective_phase(self._phase):
            parts = self._parts(len(data))
            receives = [(part, rank) for rank, part in parts.items() if rank]
            sends = [(packed(data), 0)] if data and not self.is_main else []
            transfers = self._transfers(sends, receives, self._group)
        self._transfer(transfers)
        return [_unpacked(part) if rank else value for rank, part in parts.items()]

    @_uninterrupted
    def broadcast(self, value: _T) -> _T:
        """Collective: return the main rank's value on every rank; the others' values are ignored."""
        data, size = self._pickle_and_sync(value, given=self.is_main)
        if self.world_size == 1:
            return value
        content = packed(data) if self.is_main else _memory(size)
        self._broadcast(content)
        return value if self.is_main else _unpacked(content)

    def broadcast_or(self, value: _T, otherwise: _T) -> _T:
        """Collective: return the main rank's value on every rank, or its ``otherwise`` if pickle refuses it."""
        if self.is_main and self.world_size > 1 and not can_be_pickled(value):
            value = otherwise
        return self.broadcast(value)

    def all_true(self, flag: bool) -> bool:
        """Collective: return whether the flag is true on every rank."""
        return not self.largest(not flag)[0]

    def moves(self, device_type: str) -> bool:
        """Whether tensors on such accelerators go from device to device (the caller's group has NCCL or its like)."""
        return moves(self._own, device_type)

    @_uninterrupted
    def exchange(self, sends: Sequence[_Route], receives: Sequence[_Route], device_type: str = "cpu") -> None:
        """Collective: send tensors to single ranks and fill others from single ranks, all at the same time.

        A rank with nothing to move calls it, too. What goes from one rank to another stands in the same order in the
        lists of both.

        Args:
            sends: Contiguous tensors, each with the rank that it goes to.
            receives: Contiguous tensors of the same sizes, each with the rank that it comes from.
            device_type: Where all tensors are, on every rank: the CPU, or what :meth:`moves`.
        """
        with self.collective_phase(self._phase):
            transfers = self._transfers(sends, receives, self._group_for(device_type))
        self._connect(device_type)
        self._transfer(transfers)

    @_uninterrupted
    def broadcast_tensors(self, routes: Sequence[_Route], device_type: str = "cpu") -> None:
        """Collective: fill tensors on all ranks with those of single ranks, all at the same time.

        Args:
            routes: Contiguous tensors, each with the rank whose content counts; the same list on every rank.
            device_type: As in :meth:`exchange`.
        """
        if self.world_size == 1:
            return
        with self.collective_phase(self._phase):
            group = self._group_for(device_type)
            sources = [(_raw(tensor), dist.get_global_rank(group, rank)) for tensor, rank in routes]
        self._connect(device_type)
        self._call(lambda: _finish([dist.broadcast(raw, src, group, async_op=True) for raw, src in sources]))

    def main_runs(self, name: str, function: Callable[[], _T]) -> _T:
        """Collective: run ``function`` on the main rank as a phase, and return its result on every rank."""
        result: Any = None
        with self.local_phase(name):
            if self.is_main:
                result = function()
        return self.broadcast(result)  # type: ignore[no-any-return]

    @_uninterrupted
    def largest(self, *values: int) -> list[int]:
        """Collective: return the largest of all ranks' values, by position."""
        return self._reduced(values, dist.ReduceOp.MAX)

    @_uninterrupted
    def total(self, *values: int) -> list[int]:
        """Collective: return the sums of all ranks' values, by position."""
        return self._reduced(values, dist.ReduceOp.SUM)

    @_uninterrupted
    def all_alike(self, data: bytes) -> bool:
        """Collective: return whether every rank has the same bytes; 8 bytes of their digest travel."""
        return self._alike(data)[0]

    @_uninterrupted
    def agree(self, also: bytes = b"", /, **values: Any) -> bool:
        """Collective: raise on all ranks if they do not all have the same values (compared by their ``repr``).

        Args:
            also: What is compared in the same message, and may differ.
            values: What must not.

        Returns:
            Whether every rank has the same ``also``.
        """
        mine = {name: repr(value) for name, value in values.items()}
        agreed, alike = self._alike(repr(mine).encode(), also)
        if agreed:
            return alike
        everyone = self.all_gather(mine)
        with self.collective_phase("comparing the arguments of all ranks"):
            for rank, theirs in enumerate(everyone):
                for name, value in theirs.items():
                    if value != (first := everyone[0].get(name, "nothing")):
                        raise CheckpointingException(
                            f"ranks disagree on {name}: {first} on rank 0, {value} on rank {rank}; pass the same on "
                            "every rank"
                        )
        return alike

    def _alike(self, *data: bytes) -> list[bool]:
        """Collective: return for each of the byte strings whether every rank has the same."""
        marks = [int.from_bytes(hashlib.sha256(one).digest()[:8], "little") >> 2 for one in data]
        found = self._sync(*marks, *(-mark for mark in marks))
        return [largest == -least for largest, least in zip(found, found[len(marks) :], strict=False)]

    def _transfers(self, sends: Sequence[_Route], receives: Sequence[_Route], group: Any) -> list[Any]:
        return [
            dist.P2POp(way, _raw(tensor), dist.get_global_rank(group, rank), group)
            for way, routes in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in routes
        ]

    def _transfer(self, transfers: list[Any]) -> None:
        """Collective: move what this rank and others have for each other; without that it sends nothing."""
        if transfers:
            self._call(lambda: _finish(dist.batch_isend_irecv(transfers)))

    def _group_for(self, device_type: str) -> Any:
        """The group that moves tensors on such devices."""
        return self._group if device_type == "cpu" else self._own

    def _connect(self, device_type: str) -> None:
        """Collective: connect the ranks on such devices: all must take part in the first call of NCCL."""
        if device_type != "cpu" and device_type not in self._connected:
            everyone = torch.zeros(1, device=device_type)
            self._call(lambda: dist.all_reduce(everyone, group=self._own))
            self._connected.add(device_type)

    def _main(self) -> int:
        return 0 if self._group is None else dist.get_global_rank(self._group, 0)

    def _pickle_and_sync(self, value: Any, *, given: bool = True) -> tuple[bytes, int]:
        """Collective: pickle the value, sync errors, and return the pickle with the length of the longest of all ranks.

        (torch's own object collectives need numpy, which shardckpt does not.)
        """
        if self.world_size == 1:
            return b"", 0
        try:
            data, error = pickle.dumps(value) if given else b"", None
        except Exception as exc:  # noqa: BLE001 - any class may refuse in any way
            data, error = b"", exc
        longest, *_ = self._sync(len(data), error=error)
        return data, longest

    def _all_gather_bytes(self, data: bytes, longest: int | None = None) -> list[Any]:
        """Collective: return what all ranks have pickled; ``longest`` is the most bytes, if that is known."""
        if longest is None:
            (longest,) = self._combined([len(data)], dist.ReduceOp.MAX)
        mine, everyone = packed(data, longest), _memory(longest * self.world_size)
        parts = list(everyone.view(self.world_size, longest))
        if everyone.nbytes > BY_MAIN:
            self._call(lambda: dist.all_gather(parts, mine, group=self._group, async_op=True))
        else:
            self._gather(mine, parts)
            self._broadcast(everyone)
        return [_unpacked(part) for part in parts]  # a pickle ends where it says: what follows is not read

    def _reduced(self, values: Sequence[int], operation: Any) -> list[int]:
        """Collective: sync errors, and combine the values of all ranks by position."""
        numbers = list(map(int, values))
        if len(numbers) <= _SYNC_NUMBERS:
            return self._sync(*numbers, operation=operation)
        self.sync_errors()
        return self._combined(numbers, operation)

    def _combined(self, values: list[int], operation: Any) -> list[int]:
        """Collective: combine the values of all ranks by position: on the main rank, or round a ring."""
        if self.world_size == 1:
            return values
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.world_size * found.nbytes > BY_MAIN:
            self._call(lambda: dist.all_reduce(found, op=operation, group=self._group, async_op=True))
            return found.tolist()
        everyone = found.repeat(self.world_size, 1)
        self._gather(found, everyone)
        if self.is_main:
            found = everyone.amax(0) if operation == dist.ReduceOp.MAX else everyone.sum(0)
        self._broadcast(found)
        return found.tolist()

    def _gathered(self, data: bytes, longest: int) -> list[Any]:
        """Collective: return on the main rank the values of ranks that have pickled one."""
        if not longest:
            return []
        parts = [_memory(longest) for _ in range(self.world_size if self.is_main else 0)]
        self._gather(packed(data, longest), parts)
        return [_unpacked(part) for part in parts if part[0]]  # no pickle begins with 0

    def _parts(self, nbytes: int) -> dict[int, torch.Tensor]:
        """Collective: return on the main rank memory for what each rank that has something sends to it, by rank."""
        mine = torch.tensor([nbytes], device="cpu")
        sizes = [torch.empty_like(mine) for _ in range(self.world_size if self.is_main else 0)]
        self._gather(mine, sizes)
        return {rank: _memory(int(size)) for rank, size in enumerate(sizes) if size}

    def _gather(self, mine: torch.Tensor, parts: Iterable[torch.Tensor]) -> None:
        """Collective: fill the parts on the main rank with what each rank has."""
        into = list(parts) if self.is_main else None
        self._call(lambda: dist.gather(mine, into, dst=self._main(), group=self._group, async_op=True))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Collective: fill the tensor on all ranks with the main rank's."""
        self._call(lambda: dist.broadcast(tensor, src=self._main(), group=self._group, async_op=True))

    def _call(self, collective: Callable[[], Any]) -> None:
        """Collective: call a collective of torch, and wait for the work if it returns one."""
        try:
            work = collective()
            if work is not None:
                self._wait(work)
        except (RuntimeError, ValueError) as exc:  # a peer died, the timeout passed; or the group is destroyed
            raise self._lost(self._diagnosis(exc)) from exc
        except BaseException as exc:
            if isinstance(exc, Exception) or not self._depth:
                raise
            self._interrupt = exc  # it has waited for the message to be through

    def _wait(self, work: Any) -> None:
        """Wait for a collective, and look now and then whether it failed on another rank; Ctrl-C waits until then."""
        _last_works.append(work)
        failure = None
        while True:
            try:
                if not self._by_gloo:
                    work.wait()
                    return
                if is_done(work, LOOK_INTERVAL):
                    return
                failure = failure or GroupFailure(self._group)
                if failure.is_announced():
                    raise RuntimeError("it failed on another rank")
            except BaseException as exc:  # noqa: PERF203 - an interrupt may come anywhere in the loop
                if isinstance(exc, Exception) or not self._depth:
                    raise
                self._interrupt = exc  # and on with waiting: the other ranks are on their way to this message

    def _diagnosis(self, error: Exception) -> Diagnosis:
        """Which ranks are missing, as all survivors say it."""
        try:
            return GroupFailure(self._group).diagnose(error, self._phase)
        except Exception:  # noqa: BLE001 - the group is no more, or of a kind of its own: no error may hide the first
            return Diagnosis(
                f"a collective of {self.world_size} ranks failed in {self._phase!r}: another rank died or did not "
                f"answer, or the process group was destroyed ({error})"
            )

    def _abandon(self, error: CommunicationError) -> Diagnosis:
        """Tell those who wait for this rank here why it does not come."""
        found = Diagnosis(str(error), error.missing_ranks)
        if self.world_size > 1:
            with suppress(Exception):  # the group is no more, or of a kind of its own: no error may hide the first
                return GroupFailure(self._group).abandon(found)
        return found

    def _lost(self, found: Diagnosis) -> CommunicationError:
        """The error of all ranks that are left."""
        lost = CommunicationError(found.text)
        lost.missing_ranks, lost.shared_by = found.missing, self._number
        self._raised = copy_error(lost)
        return lost

    def _local(self, error: BaseException) -> CheckpointingException:
        """The error of a single process: itself if its class would reach other ranks, else a RankFailedError."""
        report = ErrorReport.of(error, f"in {self._phase!r}")
        if not isinstance(error, CheckpointingException) or report.rebuild("") is None:
            wrapped = RankFailedError(report.message(named=True))
            wrapped.__cause__ = error
            error = wrapped
        if error.shared_by is None:
            error.shared_by = self._number
        return error


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as bytes: every backend moves those, whatever the dtype."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _memory(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _unpacked(tensor: torch.Tensor) -> Any:
    return unpickled(view_tensor(tensor))


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()


__all__ = ["BY_MAIN", "SYNC_BYTES", "Comm"]
