"""Many ranks in one process: each runs until it needs what another has not sent yet, and is run again later."""

from __future__ import annotations

import hashlib
import math
import pickle
import time
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import DIRECT_RANKS, MAX_BYTES_BY_MAIN, SYNC_BYTES
from shardckpt.distributed.routing import HEAD_BYTES, Grid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


#: Bytes of the message that says how long the next one is.
_SIZE_BYTES = 8


class _WaitingError(Exception):
    """A rank needs what is not there yet."""


class _Call:
    """A collective of all ranks: what each has given, and what has been made of it once for all."""

    def __init__(self) -> None:
        self.given: dict[int, Any] = {}
        self.result: Any = None


class Replay:
    """What ranks have sent each other, by the number of the call and the rank.

    Args:
        world_size: How many there are.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.calls: list[_Call] = []
        #: Bytes that each rank sends, and receives.
        self.sent = [0] * world_size
        self.received_by = [0] * world_size
        #: CPU seconds of the main rank.
        self.seconds = 0.0

    @property
    def received(self) -> int:
        """Bytes that the main rank receives."""
        return self.received_by[0]

    def run(self, function: Callable[[int, Recorder], Any]) -> Any:
        """Call the function for every rank until it has ended on all; what the main rank's returns."""
        waiting = set(range(self.world_size))
        result = None
        while waiting:
            for rank in sorted(waiting, reverse=True):  # the main rank last: it waits for all
                start = time.process_time()
                try:
                    value = function(rank, Recorder(rank, self))
                except _WaitingError:
                    continue
                waiting.discard(rank)
                if rank == 0:
                    result, self.seconds = value, time.process_time() - start
        return result

    def move(self, sender: int, receiver: int, nbytes: int) -> None:
        """Count bytes that go from one rank to another."""
        if sender != receiver:
            self.sent[sender] += nbytes
            self.received_by[receiver] += nbytes


class Recorder:
    """Stands for the Comm of a rank; has the primitives that validation and planning use."""

    def __init__(self, rank: int, replay: Replay) -> None:
        self.rank, self.world_size = rank, replay.world_size
        self.is_main = rank == 0
        self._replay = replay
        self._number = -1

    @contextmanager
    def collective_phase(self, _: str) -> Iterator[None]:
        """A step."""
        yield

    local_phase = collective_phase

    def all_true(self, flag: bool) -> bool:
        """Whether all ranks have given True."""
        return not self.largest(int(not flag))[0]

    def gather(self, value: Any) -> list[Any]:
        """The main rank has what all have sent."""
        return self.gather_some(value, given=True)

    def gather_some(self, value: Any, *, given: bool) -> list[Any]:
        """The main rank has what some have sent."""
        self._sync()
        return self._gather(pickle.dumps(value) if given else b"")

    def gather_up_to(self, limit: int, value: Any) -> list[Any] | None:
        """As ``gather``, or None if it were too much."""
        data = pickle.dumps(value)
        return None if self.largest(len(data))[0] * self.world_size > limit else self._gather(data)

    def _gather(self, data: bytes) -> list[Any]:
        call = self._give(data, lambda: self._replay.move(self.rank, 0, len(data)))
        if not self.is_main:
            return []
        return [pickle.loads(data) for _, data in sorted(self._all(call).items()) if data]  # noqa: S301 - its own

    def broadcast(self, value: Any) -> Any:
        """All have what the main rank has sent, which goes on from rank to rank."""
        self._sync()
        data = pickle.dumps(value) if self.is_main else b""

        def count() -> None:
            self._replay.sent[0] += len(data) * math.ceil(math.log2(self.world_size))
            for rank in range(1, self.world_size):
                self._replay.received_by[rank] += len(data)

        call = self._give(data, count if self.is_main else lambda: None)
        if 0 not in call.given:
            raise _WaitingError
        return pickle.loads(call.given[0])  # noqa: S301 - its own

    def all_gather(self, value: Any) -> list[Any]:
        """All have what all have sent, which goes on from rank to rank."""
        self._sync()
        data = pickle.dumps(value)

        def count() -> None:
            self._replay.sent[self.rank] += len(data)
            for rank in range(self.world_size):
                self._replay.received_by[rank] += len(data) if rank != self.rank else 0

        found = self._all(self._give(data, count))
        return [pickle.loads(data) for _, data in sorted(found.items())]  # noqa: S301 - its own

    def all_to_all(self, parts: Mapping[int, bytes]) -> dict[int, bytes]:
        """Each has what was sent to it; what goes over a third rank is counted there, too."""
        grid = Grid(self.world_size, DIRECT_RANKS)
        if not self.largest(len(parts))[0]:
            return {}
        for _ in range(2 if grid.is_direct else 4):  # two in each hop
            self._sync()

        def count() -> None:
            second = [] if grid.is_direct else grid.second_hop(self.rank).receivers
            for receiver in (*grid.first_hop(self.rank).receivers, *second):
                self._replay.move(self.rank, receiver, _SIZE_BYTES)
            for target, data in parts.items():
                for one, other in pairwise((self.rank, grid.turn(self.rank, target), target)):
                    self._replay.move(one, other, len(data) + HEAD_BYTES)

        call = self._give(dict(parts), count)
        everyone = self._all(call)
        if call.result is None:
            call.result = {}
            for sender, sent in sorted(everyone.items()):
                for target, data in sent.items():
                    call.result.setdefault(target, {})[sender] = data
        return dict(call.result.get(self.rank, {}))

    def all_equal(self, data: bytes) -> bool:
        """Whether all have the same."""
        digest = int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 2
        largest, negative = self._reduced((digest, -digest), max)
        return largest == -negative

    def total(self, *values: int) -> list[int]:
        """Sums of all."""
        return self._reduced(values, sum)

    def largest(self, *values: int) -> list[int]:
        """The largest of all."""
        return self._reduced(values, max)

    def _reduced(self, values: tuple[int, ...], reduce: Callable[..., int]) -> list[int]:
        """Of all ranks' values; done once for all."""
        call = self._sync(tuple(map(int, values)))
        found = self._all(call)
        if call.result is None:
            call.result = [reduce(column) for column in zip(*found.values(), strict=True)]
        return list(call.result)

    def _all(self, call: _Call) -> dict[int, Any]:
        if len(call.given) < self.world_size:
            raise _WaitingError
        return call.given

    def _sync(self, values: tuple[int, ...] = ()) -> _Call:
        """Send a few numbers to the main rank, or, where there are many ranks, as many bytes to whomever."""

        def count() -> None:
            if SYNC_BYTES * self.world_size <= MAX_BYTES_BY_MAIN:
                self._replay.move(self.rank, 0, SYNC_BYTES)
            else:  # by the backend's own algorithm: a rank receives as much as it sends
                self._replay.sent[self.rank] += SYNC_BYTES
                self._replay.received_by[self.rank] += SYNC_BYTES

        return self._give(values, count)

    def _give(self, data: Any, count: Callable[[], None]) -> _Call:
        """Give the data to the next call; it is counted once, however often the rank is run again."""
        self._number += 1
        if self._number == len(self._replay.calls):
            self._replay.calls.append(_Call())
        call = self._replay.calls[self._number]
        if self.rank not in call.given:
            call.given[self.rank] = data
            count()
        return call


__all__ = ["Recorder", "Replay"]
