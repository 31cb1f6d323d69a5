"""A pool of worker processes that form gloo groups of any size up to its own, kept between tests.

Importing torch costs seconds, forming a group milliseconds: so processes are kept and groups are made anew. On Linux
they are forks of one process that has imported torch, the fork server of multiprocessing, and start as fast.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds that a rank waits in a collective.
GROUP_TIMEOUT = 20.0
#: Seconds after which a run is ended by force.
RUN_TIMEOUT = 60.0
#: How workers start. Elsewhere a fork without a new program is not safe, or not there.
_START_METHOD = "forkserver" if sys.platform == "linux" else "spawn"


@dataclass
class RankFailure:
    """The error of a rank.

    Attributes:
        kind: The name of the exception's class.
        message: Its text.
        trace: Its traceback, as text.
    """

    kind: str
    message: str
    trace: str


class RankError(Exception):
    """A rank raised, died or did not end, and the test did not expect it."""


class Ranks(ABC):
    """A runner of functions on every rank of a group: threads of this process, or a pool of processes."""

    def run(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Run a function on every rank of a new group.

        Args:
            world_size: Number of ranks.
            function: Called as ``function(*args)`` on every rank.
            args: The same on every rank.
            timeout: Seconds after which the run has failed.

        Returns:
            The function's results, in rank order.

        Raises:
            RankError: a rank raised, with a line for each error, and the tracebacks of all ranks that did; or died, or
                did not end in time.
        """
        outcomes = self.outcomes(world_size, function, *args, timeout=timeout)
        failures = [(r, o) for r, o in enumerate(outcomes) if isinstance(o, RankFailure)]
        if failures:
            traces = "\n".join(f"rank {rank}: {failure.trace}" for rank, failure in failures)
            raise RankError(f"{_summarize(failures)}\n\n{traces}")
        return outcomes

    @abstractmethod
    def outcomes(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Run a function as :meth:`run` does; return the exception of a rank as a :class:`RankFailure`."""


def _summarize(failures: Sequence[tuple[int, RankFailure]]) -> str:
    """Return a line for each error with its ranks; last the errors of ranks that have only lost the others."""
    ranks: dict[str, list[str]] = {}
    for rank, failure in failures:
        ranks.setdefault(f"{failure.kind}: {failure.message}", []).append(str(rank))
    texts = sorted(ranks, key=lambda text: "Connection closed by peer" in text)
    return "\n".join(f"rank {', '.join(ranks[text])}: {text}" for text in texts)


class RankPool(Ranks):
    """Worker processes that are ranks of gloo groups: started at the first use, ended by :meth:`close`.

    A function that ranks run stands at the top level of a module that a new process can import, and its
    arguments and result can be pickled. After the timeout of a run the processes are killed. The pytest plugin of this
    package has a pool as the fixture ``rank_pool``.

    Args:
        size: Number of processes: the most ranks of a group.

    Attributes:
        preloaded: Modules that the fork server imports before it forks, where no other part of the program has started
            it. Add modules in a subclass; one that is missing is left out.

    Example:
        ::

            def save(path):  # in a module; every rank runs it
                rank, world_size = dist.get_rank(), dist.get_world_size()
                rows = ShardedTensor.from_rank_offsets("w", torch.full((2, 3), rank), (0, rank, world_size))
                dist_checkpointing.save({"w": rows}, path)

            def test_save(rank_pool, tmp_path):
                rank_pool.run(3, save, str(tmp_path / "checkpoint"))
    """

    preloaded: ClassVar[tuple[str, ...]] = (
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "shardckpt.dist_checkpointing",
    )

    def __init__(self, size: int) -> None:
        self._size = size
        self._workers: list[Any] = []
        self._pipes: list[Any] = []
        self._ready = 0
        self._stores: tempfile.TemporaryDirectory[str] | None = None

    def outcomes(self, world_size: int, function: Any, *args: Any, timeout: float = RUN_TIMEOUT) -> list[Any]:
        """Run a function as :meth:`run` does; return the exception of a rank as a :class:`RankFailure`."""
        store = self._start(world_size, timeout) / os.urandom(8).hex()
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
        self._workers, self._pipes, self._ready = [], [], 0
        if self._stores is not None:
            self._stores.cleanup()
            self._stores = None

    def _start(self, world_size: int, timeout: float) -> Path:
        """Start the workers, and wait until a group's have imported torch: the group's timeout begins then."""
        if self._stores is None:
            self._start_workers()
        for rank in range(self._ready, world_size):
            if not self._pipes[rank].poll(timeout):
                self.close()
                raise RankError(f"rank {rank} of {world_size} has not imported torch within {timeout} s")
            try:
                self._pipes[rank].recv()
            except EOFError:
                self.close()
                raise RankError(
                    f"rank {rank} of {world_size} died while it started: its output says why; a script that makes a "
                    'RankPool does so under `if __name__ == "__main__":`'
                ) from None
            self._ready = rank + 1
        return Path(self._stores.name)  # type: ignore[union-attr]

    def _start_workers(self) -> None:
        self._stores = tempfile.TemporaryDirectory(prefix="shardckpt-ranks-")
        context: Any = multiprocessing.get_context(_START_METHOD)
        context.set_forkserver_preload(list(self.preloaded))  # without effect on other methods, and once it runs
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            # a fork has the environment that the fork server started with
            worker = context.Process(target=_serve, args=(theirs, dict(os.environ)), daemon=True)
            worker.start()
            theirs.close()
            self._workers.append(worker)
            self._pipes.append(ours)


def _serve(pipe: Any, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)  # several ranks share the cores
    pipe.send("ready")
    while True:
        try:
            rank, world_size, store, function, args = pipe.recv()
        except EOFError:
            return
        except Exception as exc:  # noqa: BLE001 - the function is of a module that this process cannot import
            pipe.send(RankFailure(type(exc).__name__, str(exc), traceback.format_exc()))
            continue
        pipe.send(_outcome(rank, world_size, store, function, args))


def _outcome(rank: int, world_size: int, store: str, function: Any, args: tuple[Any, ...]) -> Any:
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException

    # where this fails the process ends, and the pool starts anew: torch counts groups, and would count them differently
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
        return RankFailure(type(exc).__name__, str(exc), traceback.format_exc())
    finally:
        dist.destroy_process_group()
