"""Processes that form groups of any size up to their own, from the runner's side."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.messages import Layout

ROOT = Path(__file__).parents[1]
#: Seconds that ranks have to leave in order.
_LEAVE = 20.0
#: Seconds that a new rank has to say that it is there: its spawner imports first.
_START = 180.0


class RankFailedError(Exception):
    """A rank raised, died or did not answer; its group has been ended."""


class LeftOutError(Exception):
    """An adapter cannot do it here."""


class Spawner:
    """The process that ranks are forked from, with an environment of its own; see :mod:`benchmarks.spawner`.

    Args:
        modules: What is imported before ranks are forked.
        environment: Variables besides the runner's.
        folder: Where the log and temporary files go.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._channel, theirs = socket.socketpair()
        with theirs, (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.spawner", str(theirs.fileno()), *modules],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(folder), **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the runner's
            )

    def fork(self, rank: int) -> tuple[int, Connection]:
        """A new rank: its process, which leads a process group, and the pipe to it."""
        ours, theirs = Pipe()
        with theirs:
            socket.send_fds(self._channel, [f"{rank:16}".encode()], [theirs.fileno()])
        if not ours.poll(_START):
            raise RankFailedError(f"rank {rank} did not start within {_START:.0f} s: {self.log()}")
        return ours.recv(), ours

    def log(self) -> str:
        """The end of what the process and its ranks have printed."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        try:
            self._process.wait(_LEAVE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class RankGroup:
    """Ranks in processes of their own, started at the first call and after a failure.

    Args:
        spawner: Forks them.
        size: How many there are at most.
        timeout: Seconds after which a call has failed.
    """

    def __init__(self, spawner: Spawner, size: int, timeout: float) -> None:
        self._spawner = spawner
        self._size = size
        self._timeout = timeout
        self._processes: list[int] = []
        self._pipes: list[Connection] = []

    def setup(self, layout: Layout) -> None:
        """Form a group of ``layout.world`` ranks that hold the layout's state; the others hold none."""
        self.call(self._size, "leave")
        self.call(layout.world, "setup", layout, f"file://{self._spawner.folder}/store-{os.urandom(6).hex()}")

    def call(self, world: int, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of :class:`~benchmarks.rank.Rank` on ranks 0 to ``world`` - 1; their results.

        Raises:
            LeftOutError: the adapter cannot do it.
            RankFailedError: any other failure; the ranks have no state any more.
        """
        try:
            answers = self._answers(world, self._timeout, method, args, kwargs)
        except (OSError, EOFError) as exc:
            self.kill()
            raise RankFailedError(f"{method} {args}: {self._spawner.log()}\na rank died ({exc!r})") from exc
        except BaseException:
            self.kill()
            raise
        refusals = [text for kind, text in answers if kind == "unsupported"]
        if refusals:
            raise LeftOutError(refusals[0])
        return [value for _, value in answers]

    def close(self) -> None:
        """Let the ranks leave, and end them and what they have started."""
        if self._processes:
            with contextlib.suppress(OSError, EOFError, RankFailedError):
                self._answers(self._size, _LEAVE, "leave", (), {})
        self.kill()

    def kill(self) -> None:
        """End the ranks and what they have started, whatever they do."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, signal.SIGKILL)
        self._pipes, self._processes = [], []

    def _answers(self, world: int, timeout: float, *job: Any) -> list[tuple[str, Any]]:
        while len(self._pipes) < self._size:
            process, pipe = self._spawner.fork(len(self._pipes))
            self._processes.append(process)
            self._pipes.append(pipe)
        for pipe in self._pipes[:world]:
            pipe.send(job)
        pending: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes[:world])}
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailedError(f"{job[0]}: ranks {sorted(pending.values())} did not answer in {timeout:.0f} s")
            for pipe in ready:
                rank = pending.pop(pipe)
                answers[rank] = pipe.recv()
                if answers[rank][0] == "failed":
                    raise RankFailedError(f"rank {rank}: {answers[rank][1].strip()}")
        return [answers[rank] for rank in range(world)]


__all__ = ["LeftOutError", "RankFailedError", "RankGroup", "Spawner"]
