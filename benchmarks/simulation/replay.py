"""Many ranks in one process: each runs until it needs what another has not sent yet, and is run again later."""

from __future__ import annotations

import pickle
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import MAX_BYTES_BY_MAIN, SYNC_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class _WaitingError(Exception):
    """A rank needs what is not there yet."""


class Replay:
    """What ranks have sent each other, by the number of the call and the rank.

    Args:
        world_size: How many there are.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.calls: list[dict[int, Any]] = []
        self.sent = [0] * world_size
        #: Bytes that the main rank receives.
        self.received = 0
        #: CPU seconds of the main rank.
        self.seconds = 0.0

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

    def gather(self, value: Any) -> list[Any]:
        """The main rank has what all have sent."""
        return self.gather_some(value, given=True)

    def gather_some(self, value: Any, *, given: bool) -> list[Any]:
        """The main rank has what some have sent."""
        self._sync()
        call = self._put(pickle.dumps(value) if given else b"")
        if not self.is_main:
            return []
        return [pickle.loads(data) for _, data in sorted(self._all(call).items()) if data]  # noqa: S301 - its own

    def broadcast(self, value: Any) -> Any:
        """All have what the main rank has sent."""
        self._sync()
        call = self._put(pickle.dumps(value) if self.is_main else b"")
        if 0 not in call:
            raise _WaitingError
        return pickle.loads(call[0])  # noqa: S301 - its own

    def total(self, *values: int) -> list[int]:
        """Sums of all."""
        return self._reduced(values, sum)

    def largest(self, *values: int) -> list[int]:
        """The largest of all."""
        return self._reduced(values, max)

    def _reduced(self, values: tuple[int, ...], reduce: Callable[..., int]) -> list[int]:
        """Of all ranks' values; done once for all."""
        call = self._sync(tuple(map(int, values)))
        if -1 not in call:
            call[-1] = [reduce(column) for column in zip(*self._all(call).values(), strict=True)]
        return list(call[-1])

    def _all(self, call: dict[int, Any]) -> dict[int, Any]:
        if len(call) < self.world_size:
            raise _WaitingError
        return call

    def _sync(self, values: tuple[int, ...] = ()) -> dict[int, Any]:
        """Send a few numbers to the main rank, or, where there are many ranks, as many bytes to whomever."""
        return self._put(values, SYNC_BYTES, to_main=SYNC_BYTES * self.world_size <= MAX_BYTES_BY_MAIN)

    def _put(self, data: Any, nbytes: int | None = None, *, to_main: bool = True) -> dict[int, Any]:
        """Send to the main rank; if not, it receives no more than it sends."""
        replay = self._replay
        nbytes = len(data) if nbytes is None else nbytes
        self._number += 1
        if self._number == len(replay.calls):
            replay.calls.append({})
        call = replay.calls[self._number]
        if self.rank not in call:
            call[self.rank] = data
            replay.sent[self.rank] += nbytes
            if self.is_main != to_main:
                replay.received += nbytes
        return call


__all__ = ["Recorder", "Replay"]
