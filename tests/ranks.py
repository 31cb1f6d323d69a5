"""A pool of worker processes that form gloo groups of any size up to its own, kept between tests.

Importing torch costs seconds here, forming a group milliseconds: so processes are kept and groups are made anew.
A test hands over a module-level function; every rank of the group runs it, and the test gets all results.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUP_TIMEOUT = 8.0  # seconds that a rank waits in a collective
RUN_TIMEOUT = 60.0  # seconds after which a run is ended by force


@dataclass
class Failure:
    """What a rank raised."""

    kind: str
    message: str
    trace: str


class RankError(Exception):
    """A rank raised, and the test did not expect it."""


class RankPool:
    """Worker processes, started on first use and ended with the pool."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[Any] = []
        self._pipes: list[Any] = []
        self._stores: tempfile.TemporaryDirectory[str] | None = None

    def run(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Results of ``function(*args)`` on every rank, in rank order; :class:`RankError` if any raised."""
        outcomes = self.outcomes(world_size, function, *args, timeout=timeout)
        failures = [(r, o) for r, o in enumerate(outcomes) if isinstance(o, Failure)]
        if failures:
            raise RankError("\n".join(f"rank {rank}: {failure.trace}" for rank, failure in failures))
        return outcomes

    def outcomes(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """The same with a :class:`Failure` in the place of what a rank raised."""
        store = self._start() / os.urandom(8).hex()
        for rank in range(world_size):
            self._pipes[rank].send((rank, world_size, str(store), function, args))
        results = []
        for rank in range(world_size):
            if not self._pipes[rank].poll(timeout):
                self.close()
                raise RankError(f"rank {rank} of {world_size} did not end within {timeout} s")
            try:
                results.append(self._pipes[rank].recv())
            except EOFError:
                self.close()
                raise RankError(f"rank {rank} of {world_size} died") from None
        return results

    def close(self) -> None:
        """End the workers; a later run starts new ones."""
        for worker in self._workers:
            worker.kill()
            worker.join()
        for pipe in self._pipes:
            pipe.close()
        self._workers, self._pipes = [], []
        if self._stores is not None:
            self._stores.cleanup()
            self._stores = None

    def _start(self) -> Path:
        if self._stores is not None:
            return Path(self._stores.name)
        self._stores = tempfile.TemporaryDirectory(prefix="shardckpt-ranks-")
        context = multiprocessing.get_context("spawn")
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            worker = context.Process(target=_serve, args=(theirs,), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)
        return Path(self._stores.name)


def _serve(pipe: Any) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            rank, world_size, store, function, args = pipe.recv()
        except EOFError:
            return
        pipe.send(_outcome(rank, world_size, store, function, args))


def _outcome(rank: int, world_size: int, store: str, function: Any, args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=dt.timedelta(seconds=GROUP_TIMEOUT),
    )
    try:
        dist.barrier()  # a rank that is done before another has connected would break it
        return function(*args)
    except (Exception, CheckpointException) as exc:  # noqa: BLE001 - the test decides; DCP's is no Exception
        return Failure(type(exc).__name__, str(exc), traceback.format_exc())
    finally:
        dist.destroy_process_group()


__all__ = ["Failure", "RankError", "RankPool"]
