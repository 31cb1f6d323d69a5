"""The only file that calls collectives: after each of them all ranks go on, or all raise the same error.

Each collective of :class:`Comm` begins with a small message that says whether a rank has failed: the ranks sync errors.
A rank that fails goes to its next sync and finds the others at theirs. All raise, and no rank is left in a collective
that another never enters. A rank's own work needs no sync of its own: the next collective has one.

Small values go to the main rank, which sends them to all. So the main rank notices at once when a rank dies, and the
others learn it from the main rank. A rank that stops is noticed when the group's timeout ends. Together the survivors
find out which rank it is: see :mod:`shardckpt.distributed.group_failure`. Long before, a rank that waits says so: see
:mod:`shardckpt.distributed.long_wait`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import time
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar
from weakref import ref

import torch
import torch.distributed as dist

from shardckpt.distributed.error_report import ErrorReport, copy_error, join_messages
from shardckpt.distributed.group_failure import (
    POLL_INTERVAL,
    Diagnosis,
    GroupFailure,
    GroupView,
    moves_by_gloo,
    record_first_use,
    wait_for,
)
from shardckpt.distributed.groups import get_cpu_group, get_live_group, moves_between, resolve_group
from shardckpt.distributed.long_wait import LongWait
from shardckpt.distributed.pickling import pickle_value, unpickle_trusted
from shardckpt.distributed.routing import DIRECT_RANKS, Grid, check_targets, join_parts, split_parts
from shardckpt.errors import CheckpointingException, CommunicationError, RankFailedError, show_given
from shardckpt.tensors.raw_memory import pack_bytes, view_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from shardckpt.distributed.routing import Hop

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: A tensor, and the rank that it is sent to or received from.
_Route: TypeAlias = "tuple[torch.Tensor, int]"

#: Bytes that the main rank receives from all ranks in one gather, padding included.
_AT_ONCE = 16 << 20
#: Bytes of all ranks, at most, that go to the main rank and from it to all. With gloo that is faster than its ring, in
#: which even a few bytes take a step for each rank. More bytes, as of 10,000 ranks, go by the backend's own algorithm.
MAX_BYTES_BY_MAIN = 512 << 10
#: Numbers that one sync of errors carries, at most.
_SYNC_NUMBERS = 7
#: Bytes of a sync of errors.
SYNC_BYTES = 8 * (1 + _SYNC_NUMBERS)
#: The last few collectives, still referenced here. A thread of gloo drops its reference to a collective just after it
#: has woken the waiting thread. If that reference were the last, gloo's thread would free the tensors and need the
#: interpreter for it. An interpreter that is shutting down would abort the process then ("terminate called without an
#: active exception").
_last_works: deque[Any] = deque(maxlen=4)
# One reference too many: the deque itself survives the interpreter's shutdown.
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_last_works))
#: The name of the time before the first phase, for errors.
_NO_PHASE = "start"
#: Numbers the Comms of a process.
_numbers = itertools.count()


def _uninterrupted(collective: Callable[Concatenate[Comm, _P], _T]) -> Callable[Concatenate[Comm, _P], _T]:
    """Delay Ctrl-C until the last message of a collective is done: the other ranks wait for it."""

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


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the number of ranks; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


class Comm:
    """The ranks that save or load together; with no process group, one rank.

    A method whose docstring begins with ``Collective:`` is called by every rank of the group. Two rules keep a job from
    hanging:

    1. Every rank calls the same collectives in the same order, and code that can fail on one rank alone stands in a
    phase.
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
        alone: If True, a group of this process only, whether torch.distributed is initialised or not.

    Attributes:
        rank: This process's number in the group, from 0; in a subgroup, too.
        world_size: The number of ranks in the group.
    """

    #: Seconds since some moment; tests have simulated ones.
    _clock = staticmethod(time.monotonic)

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, alone: bool = False) -> None:
        active = not alone and dist.is_available() and dist.is_initialized()
        if process_group is not None and not active and not alone:
            raise CheckpointingException(
                f"process_group={show_given(process_group)}: torch.distributed is not initialised in this process, or "
                "no more, and it would go on alone: call torch.distributed.init_process_group before, or give no group"
            )
        own = resolve_group(process_group) if active else None
        group = get_cpu_group(own) if active else None
        # weak: an error's traceback may keep this Comm alive, and a job must still be able to destroy its groups
        self._groups = (ref(own), ref(group)) if active else None
        self._by_gloo = active and moves_by_gloo(group)
        if active:
            record_first_use(group)
        self.rank: int = dist.get_rank(group) if active else 0
        self.world_size: int = dist.get_world_size(group) if active else 1
        self._phase = _NO_PHASE
        self._number = next(_numbers)
        #: The shared error that this rank is raising. Later failures are not reported: the others raise this one, too.
        self._raised: CheckpointingException | None = None
        self._connected: set[str] = set()
        #: Returns, for an error's text, whose code has raised it: ``"in a.plugins.Class, ..."``, or ``""``.
        self.describe_origin: Callable[[BaseException], str] = _no_origin
        #: How many collectives of this Comm this rank is in: one calls another.
        self._depth = 0
        #: A Ctrl-C that waits for the outermost collective to end.
        self._interrupt: BaseException | None = None

    @property
    def _own(self) -> Any:
        """The caller's group."""
        return None if self._groups is None else get_live_group(self._groups[0])

    @property
    def _group(self) -> Any:
        """The group that moves CPU tensors: the caller's, or the gloo group of its ranks."""
        return None if self._groups is None else get_live_group(self._groups[1])

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of the group, which collects and announces."""
        return self.rank == 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the group, by their numbers in the whole job."""
        return (0,) if self._group is None else tuple(dist.get_process_group_ranks(self._group))

    @contextmanager
    def collective_phase(self, name: str) -> Iterator[None]:
        """Collective: do a phase; at its end all ranks go on, or all raise the error of the first that failed.

        It is a :meth:`local_phase` that ends with :meth:`sync_errors`. Use it where the next step needs every rank to
        have succeeded: before collectives of a smaller group or of another library, before an hour of writing.

        Args:
            name: The work of the phase, for the error: "planning", "writing tensors".

        Raises:
            CheckpointingException: on every rank, if any failed.
        """
        with self.local_phase(name):
            yield
            self.sync_errors()

    def local_phase(self, name: str) -> AbstractContextManager[None]:
        """Do this rank's part of a phase, without a message; the next collective raises its error on all ranks.

        A rank that fails enters that collective at once, and raises here the error that all raise. The other ranks
        first run the code before that collective, although this rank has failed. See :class:`Comm` for the code that
        may stand there, and :meth:`collective_phase` for the name.
        """
        return _LocalPhase(self, name)

    @_uninterrupted
    def sync_errors(self, error: BaseException | None = None) -> None:
        """Collective: raise the same error on all ranks if any rank has failed, else go on.

        Args:
            error: The error of this rank, if it failed; phases pass it.

        Raises:
            CheckpointingException: on every rank, if any failed.
        """
        self._sync(error=error)

    def _sync(self, *values: int, error: BaseException | None = None, operation: Any = dist.ReduceOp.MAX) -> list[int]:
        """Collective: sync errors, and combine a few values of all ranks by position, in one message of fixed size."""
        if isinstance(error, CheckpointingException) and error.shared_by == self._number:
            raise error  # all ranks are raising it: an inner phase has shared it
        if isinstance(error, CommunicationError) and error.shared_by is not None:
            # A rank did not answer in a smaller group. A collective of this group would wait for it, too.
            raise self._make_lost_error(self._abandon(error)) from error
        if error is not None and self._raised is not None:
            if not isinstance(error, Exception):
                raise error
            raise copy_error(self._raised) from error  # the error that all ranks raise, not a later one of this rank
        self._raised = None
        if self.world_size == 1:
            if error is not None:
                raise self._make_local_error(error)
            return list(values)
        padding = [0] * (_SYNC_NUMBERS - len(values))
        failed, *combined = self._combine([int(error is not None), *values, *padding], operation)
        if failed:  # the same number on every rank, so all enter the collectives of _share_error
            raise self._share_error(error)
        return combined[: len(values)]

    def _share_error(self, error: BaseException | None) -> CheckpointingException:
        """Collective: return the one error that all ranks raise, after some have failed, with this rank's as its cause.

        Where it has the text of this rank's own error, it has that one's traceback and cause: a traceback shows each
        text once. It is the error of the first rank that failed, with its class if every rank can import that class:
        see :class:`ErrorReport`.
        """
        where = f"rank {self.rank}, in {self._phase!r}"
        report = None if error is None else ErrorReport.of(error, where + self._name_origin(error), self.phase)
        everyone: list[ErrorReport | None] = self._all_gather_bytes(pickle_value(report))
        reports = [report for report in everyone if report is not None]
        shared = reports[0].rebuild(join_messages(reports))
        is_unknown = self._combine([int(shared is None)], dist.ReduceOp.MAX) != [0]  # on any rank: classes must agree
        if shared is None or is_unknown:
            shared = RankFailedError(join_messages(reports, named=True))
        shared.shared_by = self._number
        shared.phase = shared.phase or reports[0].phase
        self._raised = copy_error(shared)
        if error is not None and report is not None:
            is_said = type(shared) is type(error) and report.text in str(shared)
            shared.__cause__ = error.__cause__ if is_said else error
            shared.__traceback__ = error.__traceback__ if is_said else None
        return shared

    @_uninterrupted
    def all_gather(self, value: _T) -> list[_T]:
        """Collective: return every rank's value, in rank order, on every rank; of one rank the value itself, no copy.

        Raises:
            CheckpointingException: on every rank, if any rank failed before or cannot pickle its value.
        """
        data, longest = self._pickle_and_sync(value)
        return [value] if self.world_size == 1 else self._all_gather_bytes(data, longest)

    def gather(self, value: _T) -> list[_T]:
        """Collective: return every rank's value, in rank order, on the main rank; an empty list on the others."""
        return self.gather_some(value, given=True)

    @_uninterrupted
    def gather_some(self, value: _T, *, given: bool) -> list[_T]:
        """Collective: return the values of the ranks with ``given=True``, as :meth:`gather` does."""
        data, longest = self._pickle_and_sync(value, given=given)
        return self._gather_pickles(value, data, longest, given=given)

    @_uninterrupted
    def gather_up_to(self, limit: int, value: _T) -> list[_T] | None:
        """Collective: do as :meth:`gather` does, unless the ranks send more than ``limit`` bytes.

        Args:
            limit: Most bytes of the longest pickle times the number of ranks.
            value: As in :meth:`gather`.

        Returns:
            The result of :meth:`gather`; or None on every rank, and nothing was sent. With one rank, its value.
        """
        data, longest = self._pickle_and_sync(value)
        if self.world_size > 1 and longest * self.world_size > limit:
            return None
        return self._gather_pickles(value, data, longest)

    def _gather_pickles(self, value: _T, data: bytes, longest: int, *, given: bool = True) -> list[_T]:
        """Collective: return on the main rank the values whose pickles the ranks have made."""
        if self.world_size == 1:
            return [value] if given else []
        senders = range(self.world_size if self.is_main else 0)
        if not longest:
            return []
        if longest * self.world_size <= _AT_ONCE:
            padded = [_allocate(longest) for _ in senders]
            self._gather(pack_bytes(data, longest), padded)
            return [_unpack(part) for part in padded if part[0]]  # no pickle begins with 0, which is padding
        # One by one: the main rank takes no memory for ranks without a value, nor for the padding of short ones.
        with self.collective_phase(self._phase):
            nbytes = torch.tensor([len(data)], device="cpu")
            sizes = [torch.empty_like(nbytes) for _ in senders]
            self._gather(nbytes, sizes)
            parts = {rank: _allocate(int(size)) for rank, size in enumerate(sizes) if size}
            receives = [(part, rank) for rank, part in parts.items() if rank]
            sends = [(pack_bytes(data), 0)] if data and not self.is_main else []
            transfers = self._plan_transfers(sends, receives, self._group)
        self._transfer(transfers)
        return [_unpack(part) if rank else value for rank, part in parts.items()]

    @_uninterrupted
    def broadcast(self, value: _T) -> _T:
        """Collective: return the main rank's value on every rank; the others' values are ignored."""
        data, size = self._pickle_and_sync(value, given=self.is_main)
        if self.world_size == 1:
            return value
        content = pack_bytes(data) if self.is_main else _allocate(size)
        self._broadcast(content)
        return value if self.is_main else _unpack(content)

    @_uninterrupted
    def scatter(self, values: Sequence[_T]) -> _T:
        """Collective: send each rank its value from the main rank; return this rank's.

        Args:
            values: A value for each rank, in rank order, on the main rank; ignored on the others.
        """
        parts: dict[int, bytes] = {}
        with self.local_phase(self._phase):
            if self.is_main:
                if len(values) != self.world_size:
                    raise CheckpointingException(f"there are {len(values)} values for {self.world_size} ranks")
                parts = {rank: pickle_value(value) for rank, value in enumerate(values) if rank}
        received = self.all_to_all(parts)
        # the main rank's own value does not travel
        return values[0] if self.is_main else unpickle_trusted(next(iter(received.values())))

    def all_true(self, flag: bool) -> bool:
        """Collective: return whether the flag is true on every rank."""
        return not self.largest(not flag)[0]

    def moves(self, device_type: str) -> bool:
        """Return whether the caller's group moves tensors between such devices directly, as NCCL does.

        Args:
            device_type: As in ``torch.device(...).type``: "cuda".
        """
        return moves_between(self._own, device_type)

    @_uninterrupted
    def exchange(self, sends: Sequence[_Route], receives: Sequence[_Route], device_type: str = "cpu") -> None:
        """Collective: send tensors to single ranks and receive others from single ranks, all at the same time.

        A rank with nothing to move calls it, too. Tensors from one rank to another have the same order in the lists of
        both ranks: messages carry no names.

        Args:
            sends: Contiguous tensors, each with the rank that it goes to.
            receives: Contiguous tensors of the same sizes in bytes, which are filled, each with the rank that it comes
                from.
            device_type: Where all tensors are, on every rank: "cpu", or a type that :meth:`moves`.
        """
        with self.collective_phase(self._phase):
            transfers = self._plan_transfers(sends, receives, self._group if device_type == "cpu" else self._own)
        self._connect(device_type)
        self._transfer(transfers)

    @_uninterrupted
    def all_to_all(self, parts: Mapping[int, bytes]) -> dict[int, bytes]:
        """Collective: send bytes to single ranks, and return the bytes sent to this one.

        Values that all ranks must compare go to owners (:func:`shardckpt.distributed.find_owner`) where gathering them
        on one rank would be too much: each rank then receives about as much as it sends, for any number of ranks.
        Messages of more than 64 ranks go over a third rank: see :mod:`shardckpt.distributed.routing`.

        Args:
            parts: Bytes by the rank that they go to; a rank with nothing to send passes ``{}``.

        Returns:
            Bytes by the rank that sent them, ascending; without the ranks that sent none.

        Raises:
            CheckpointingException: on every rank, if any failed before, or names a rank that does not exist.

        Example:
            >>> rows = defaultdict(list)  # doctest: +SKIP
            >>> for key, row in mine:
            ...     rows[find_owner(key, comm.world_size)].append(row)
            >>> found = comm.all_to_all({owner: b"".join(some) for owner, some in rows.items()})
        """
        with self.local_phase(self._phase):
            check_targets(parts, self.world_size)
            grid = Grid(self.world_size, DIRECT_RANKS)
            messages = _group_parts((grid.turn(self.rank, target), target, data) for target, data in parts.items())
        if not self._sync(len(parts))[0]:
            return {}
        arrived = self._send_along(grid.first_hop(self.rank), messages)
        onward = _group_parts((target, origin, data) for origin, found in arrived for target, data in found)
        last = [*onward.items()] if grid.is_direct else self._send_along(grid.second_hop(self.rank), onward)
        return dict(sorted((origin, data) for _, found in last for origin, data in found))

    @_uninterrupted
    def broadcast_tensors(self, routes: Sequence[_Route], device_type: str = "cpu") -> None:
        """Collective: fill tensors on all ranks with tensors of single ranks, all at the same time.

        Args:
            routes: Contiguous tensors, each with the rank that has its content; on the others it is filled. Every rank
                passes tensors of the same sizes in bytes, in the same order.
            device_type: As in :meth:`exchange`.
        """
        if self.world_size == 1:
            return
        with self.collective_phase(self._phase):
            group = self._group if device_type == "cpu" else self._own
            sources = [(_as_bytes(tensor), dist.get_global_rank(group, rank)) for tensor, rank in routes]
        self._connect(device_type)
        self._call(lambda: _finish([dist.broadcast(raw, src, group, async_op=True) for raw, src in sources]))

    def main_runs(self, name: str, function: Callable[[], _T]) -> _T:
        """Collective: run ``function`` on the main rank as a phase, and return its result on every rank.

        Args:
            name: As in :meth:`collective_phase`.
            function: Takes nothing and returns a value that can be pickled. On the other ranks it is not called.

        Returns:
            The function's result.

        Raises:
            CheckpointingException: on every rank, if the function failed.
        """
        result: Any = None
        with self.local_phase(name):
            if self.is_main:
                result = function()
            return self.broadcast(result)  # type: ignore[no-any-return]  # inside: its wait is reported by the phase's name

    @_uninterrupted
    def largest(self, *values: int) -> list[int]:
        """Collective: return the largest of all ranks' values, by position."""
        return self._reduce(values, dist.ReduceOp.MAX)

    @_uninterrupted
    def total(self, *values: int) -> list[int]:
        """Collective: return the sums of all ranks' values, by position."""
        return self._reduce(values, dist.ReduceOp.SUM)

    @_uninterrupted
    def all_equal(self, data: bytes) -> bool:
        """Collective: return whether every rank has the same bytes, compared by 62 bits of their SHA-256."""
        return self._are_same(data)[0]

    @_uninterrupted
    def agree(self, also: bytes = b"", /, **values: Any) -> bool:
        """Collective: raise on all ranks if they do not all have the same values (compared by their ``repr``).

        Args:
            also: Bytes that are compared in the same message, and may differ.
            values: Values that must be the same, by the names that the error gives them.

        Returns:
            Whether every rank has the same ``also``.
        """
        mine = {name: repr(value) for name, value in values.items()}
        agreed, same_also = self._are_same(repr(mine).encode(), also)
        if agreed:
            return same_also
        everyone = self.all_gather(mine)
        with self.collective_phase("comparing the arguments of all ranks"):
            for rank, theirs in enumerate(everyone):
                for name, value in theirs.items():
                    if value != (first := everyone[0].get(name, "nothing")):
                        raise CheckpointingException(
                            f"ranks disagree on {name}: {first} on rank 0, {value} on rank {rank}; pass the same on "
                            "every rank"
                        )
        return same_also

    def _are_same(self, *data: bytes) -> list[bool]:
        """Collective: return for each of the byte strings whether every rank has the same."""
        if self.world_size == 1:  # nothing to compare, and digests take a part of the time of a small load
            self._sync()
            return [True] * len(data)
        # 62 bits: a digest and its negative fit into the signed 64 bits of a sync, whose maximum of both gives the
        # largest and the smallest digest of all ranks.
        digests = [int.from_bytes(hashlib.sha256(one).digest()[:8], "little") >> 2 for one in data]
        found = self._sync(*digests, *(-digest for digest in digests))
        return [largest == -smallest for largest, smallest in zip(found, found[len(digests) :], strict=False)]

    def _send_along(
        self, hop: Hop, messages: Mapping[int, list[tuple[int, bytes]]]
    ) -> list[tuple[int, list[tuple[int, bytes]]]]:
        """Collective: send a message to some partners; return the parts of received messages, with their senders."""
        with self.collective_phase(self._phase):
            outgoing = {rank: pack_bytes(join_parts(messages[rank])) for rank in hop.receivers if rank in messages}
            empty = _allocate(0)
            lengths = {rank: torch.tensor([outgoing.get(rank, empty).nbytes], device="cpu") for rank in hop.receivers}
            sizes = {rank: torch.zeros(1, dtype=torch.int64, device="cpu") for rank in hop.senders}
            transfers = self._plan_transfers(_routes(lengths), _routes(sizes), self._group)
        self._transfer(transfers)
        with self.collective_phase(self._phase):
            incoming = {rank: _allocate(int(size)) for rank, size in sizes.items() if size}
            transfers = self._plan_transfers(_routes(outgoing), _routes(incoming), self._group)
        self._transfer(transfers)
        found = [(rank, list(split_parts(view_tensor(message)))) for rank, message in incoming.items()]
        return [*found, (self.rank, messages[self.rank])] if self.rank in messages else found

    def _plan_transfers(self, sends: Sequence[_Route], receives: Sequence[_Route], group: Any) -> list[Any]:
        """Return the sends and receives of this rank, not yet started."""
        return [
            dist.P2POp(way, _as_bytes(tensor), dist.get_global_rank(group, rank), group)
            for way, routes in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in routes
        ]

    def _transfer(self, transfers: list[Any]) -> None:
        """Collective: start the sends and receives of all ranks and wait for them; a rank without any does nothing."""
        if transfers:
            self._call(lambda: _finish(dist.batch_isend_irecv(transfers)))

    def _connect(self, device_type: str) -> None:
        """Collective: connect the ranks on such devices: all must take part in the first call of NCCL."""
        if device_type != "cpu" and device_type not in self._connected:
            everyone = torch.zeros(1, device=device_type)
            self._call(lambda: dist.all_reduce(everyone, group=self._own))
            self._connected.add(device_type)

    def _pickle_and_sync(self, value: Any, *, given: bool = True) -> tuple[bytes, int]:
        """Collective: pickle the value, sync errors, and return the pickle with the length of the longest of all ranks.

        (torch's own object collectives need numpy, which shardckpt does not.)
        """
        if self.world_size == 1:
            return b"", 0
        try:
            data, error = pickle_value(value) if given else b"", None
        except Exception as exc:  # noqa: BLE001 - any class may refuse with any error
            data, error = b"", exc
        longest, *_ = self._sync(len(data), error=error)  # one message for errors and sizes
        return data, longest

    def _all_gather_bytes(self, data: bytes, longest: int | None = None) -> list[Any]:
        """Collective: unpickle and return every rank's bytes; ``longest`` is their largest length, if it is known."""
        if longest is None:
            (longest,) = self._combine([len(data)], dist.ReduceOp.MAX)
        mine, everyone = pack_bytes(data, longest), _allocate(longest * self.world_size)
        parts = list(everyone.view(self.world_size, longest))
        if everyone.nbytes > MAX_BYTES_BY_MAIN:
            self._call(lambda: dist.all_gather(parts, mine, group=self._group, async_op=True))
        else:
            self._gather(mine, parts)
            self._broadcast(everyone)
        return [_unpack(part) for part in parts]  # a pickle marks its own end: the padding is not read

    def _reduce(self, values: Sequence[int], operation: Any) -> list[int]:
        """Collective: sync errors, and combine the values of all ranks by position."""
        numbers = list(map(int, values))
        # a rank that has failed syncs by MAX: an all-reduce must have one operation, where the main rank uses its own
        is_one_message = operation == dist.ReduceOp.MAX or self.world_size * SYNC_BYTES <= MAX_BYTES_BY_MAIN
        if len(numbers) <= _SYNC_NUMBERS and is_one_message:
            return self._sync(*numbers, operation=operation)
        self.sync_errors()
        return self._combine(numbers, operation)

    def _combine(self, values: list[int], operation: Any) -> list[int]:
        """Collective: combine the values of all ranks by position: on the main rank, or by an all-reduce."""
        if self.world_size == 1:
            return values
        found = torch.tensor(values, dtype=torch.int64, device="cpu")
        if self.world_size * found.nbytes > MAX_BYTES_BY_MAIN:
            self._call(lambda: dist.all_reduce(found, op=operation, group=self._group, async_op=True))
            return found.tolist()
        everyone = found.repeat(self.world_size, 1)
        self._gather(found, everyone)
        if self.is_main:
            found = everyone.amax(0) if operation == dist.ReduceOp.MAX else everyone.sum(0)
        self._broadcast(found)
        return found.tolist()

    def _main_rank(self) -> int:
        """Return the number of the group's main rank in the whole job."""
        return dist.get_global_rank(self._group, 0)

    def _gather(self, mine: torch.Tensor, parts: Iterable[torch.Tensor]) -> None:
        """Collective: fill the parts on the main rank with each rank's tensor."""
        into = list(parts) if self.is_main else None
        self._call(lambda: dist.gather(mine, into, dst=self._main_rank(), group=self._group, async_op=True))

    def _broadcast(self, tensor: torch.Tensor) -> None:
        """Collective: fill the tensor on all ranks with the main rank's."""
        self._call(lambda: dist.broadcast(tensor, src=self._main_rank(), group=self._group, async_op=True))

    def _call(self, collective: Callable[[], Any]) -> None:
        """Collective: call a collective of torch, and wait for it where it returns a work handle."""
        try:
            work = collective()
            if work is not None:
                self._wait(work)
        except (RuntimeError, ValueError) as exc:  # a peer died, the timeout passed; or the group was destroyed
            raise self._make_lost_error(self._diagnose(exc)) from exc
        except BaseException as exc:
            if isinstance(exc, Exception) or not self._depth:
                raise
            self._interrupt = exc  # Ctrl-C: raised when the outermost collective is done

    def _wait(self, work: Any) -> None:
        """Wait for a collective, and poll for its failure on another rank; Ctrl-C is kept for later.

        The wait is said to be long once it is. A collective that ends before the first poll pays for neither.
        """
        _last_works.append(work)
        started = self._clock()
        failure = waiting = None
        try:
            while True:
                try:
                    if not self._by_gloo:
                        work.wait()
                        return
                    if wait_for(work, POLL_INTERVAL):
                        return
                    failure = failure or self._make_failure()
                    if failure.is_announced():
                        raise RuntimeError("it failed on another rank")
                    waiting = waiting or self.begin_wait(self.phase, started)
                    waiting.report_once(self._clock())
                except BaseException as exc:  # noqa: PERF203 - an interrupt may come anywhere in the loop
                    if isinstance(exc, Exception) or not self._depth:
                        raise
                    self._interrupt = exc  # keep waiting: the other ranks take part in this message
        finally:
            if waiting is not None:
                waiting.end()

    def begin_wait(self, phase: str, started: float) -> LongWait:
        """Begin a wait of this rank for the others, which is reported once it is long: see :class:`LongWait`."""
        members = self.members
        return LongWait(started, members[self.rank], members, phase)

    def _make_failure(self) -> GroupFailure:
        return GroupFailure(GroupView(self._group))

    def _diagnose(self, error: Exception) -> Diagnosis:
        """Return which ranks are missing, as all survivors report it."""
        try:
            return self._make_failure().diagnose(error, self._phase)
        except Exception:  # noqa: BLE001 - the group is destroyed, or of another kind: no error may hide the first
            return Diagnosis(
                f"a collective of {self.world_size} ranks failed in {self._phase!r}: another rank died or did not "
                f"answer, or the process group was destroyed ({error})"
            )

    def _abandon(self, error: CommunicationError) -> Diagnosis:
        """Announce to the ranks that wait for this one in this group why it does not come."""
        found = Diagnosis(str(error), error.missing_ranks)
        if self.world_size > 1:
            with suppress(Exception):  # the group is destroyed, or of another kind: no error may hide the first
                return self._make_failure().abandon(found)
        return found

    def _make_lost_error(self, found: Diagnosis) -> CommunicationError:
        """Return the error that all survivors raise."""
        lost = CommunicationError(found.text)
        lost.missing_ranks, lost.shared_by = found.missing, self._number
        self._raised = copy_error(lost)
        return lost

    def _make_local_error(self, error: BaseException) -> CheckpointingException:
        """Return the error that several ranks would raise; if it is of the family and would reach them, it itself."""
        origin = self._name_origin(error)
        shared: Any = ErrorReport.of(error, f"in {self._phase!r}{origin}").to_error()
        if type(shared) is type(error) and not origin:
            shared = error  # with all of its attributes, and without a phase in its text
        else:
            shared.__cause__ = error
        if shared.shared_by is None:
            shared.shared_by = self._number
        shared.phase = shared.phase or self.phase
        return shared  # type: ignore[no-any-return]

    @property
    def phase(self) -> str:
        """The work of this rank, as errors name it; "" if no phase has begun."""
        return "" if self._phase == _NO_PHASE else self._phase

    def _name_origin(self, error: BaseException) -> str:
        try:
            origin = self.describe_origin(error)
        except Exception:  # noqa: BLE001 - it looks at a plugin's classes; no error may hide the first
            return ""
        return origin and f", {origin}"


class _LocalPhase:
    """The block of :meth:`Comm.local_phase`; no generator: a load has two dozen, one of a slice few milliseconds."""

    __slots__ = ("_before", "_comm", "_name")

    def __init__(self, comm: Comm, name: str) -> None:
        self._comm = comm
        self._name = name
        self._before = ""

    def __enter__(self) -> None:
        comm = self._comm
        self._before, comm._phase, comm._raised = comm._phase, self._name, None  # noqa: SLF001 - a method's block

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        if error is None:
            self._comm._phase = self._before  # noqa: SLF001
            return None
        if not isinstance(error, Exception):  # Ctrl-C or an exit: the others raise an error, this rank ends as asked
            with suppress(CheckpointingException):
                self._comm.sync_errors(error)
            return None
        try:
            self._comm.sync_errors(error)  # whatever it is, the other ranks must raise it, too
        except Exception as exc:
            if exc is not error:
                raise
            error.__traceback__ = traceback
        return None


def _no_origin(_error: BaseException) -> str:
    return ""


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as uint8: every backend moves that, whatever the dtype."""
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def _routes(tensors: Mapping[int, torch.Tensor]) -> list[_Route]:
    return [(tensor, rank) for rank, tensor in tensors.items()]


def _group_parts(parts: Iterable[tuple[int, int, bytes]]) -> dict[int, list[tuple[int, bytes]]]:
    """Return (rank, data) by the rank that they are sent to next."""
    found: dict[int, list[tuple[int, bytes]]] = {}
    for to, rank, data in parts:
        found.setdefault(to, []).append((rank, data))
    return found


def _unpack(tensor: torch.Tensor) -> Any:
    return unpickle_trusted(view_tensor(tensor))


def _finish(works: Sequence[Any]) -> None:
    for work in works:
        work.wait()
