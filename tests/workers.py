"""Processes of background saves that start in milliseconds: forks of one process that has imported torch and shardckpt.

In pytest's process and on the ranks of its pools, a queue's process is not a new interpreter, which takes seconds for
its imports, but is forked from ``tests.programs``: what it does, its pipe, its signals and its end are the same. As a
trainer starts it is what ``tests/background/test_process.py`` has, and all programs that tests run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests import backends, programs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class ForkedWorker:
    """A queue's process, with the methods of ``subprocess.Popen`` that WorkerProcess uses.

    Args:
        find: Returns where the process listens that forks.
        command: The new interpreter's, of which the code and the arguments are run.
        options: As ``Popen`` takes them: ``pass_fds`` has the pipe.
    """

    def __init__(self, find: Callable[[], bytes], command: list[str], **options: Any) -> None:
        (pipe,) = options["pass_fds"]
        self._lock = threading.Lock()  # the thread that listens asks, too
        self._server = programs.connect(find())
        self.returncode: int | None = None
        environment = {name: value for name, value in os.environ.items() if name != backends.VARIABLE}
        request = programs.Request(
            command[2], "", "", tuple(command[3:]), str(Path.cwd()), environment, warnings_are_errors=False
        )
        with Path(os.devnull).open("rb") as nothing:
            self.pid = programs.fork(self._server, request, [nothing.fileno(), 1, 2, pipe])

    def kill(self) -> None:
        """Kill it, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Wait for its end."""
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("worker", timeout)
            time.sleep(0.002)
        return code

    def poll(self) -> int | None:
        """Look whether it has ended."""
        with self._lock:
            if self.returncode is None:
                self.returncode = programs.poll(self._server, self.pid)
            return self.returncode


def fork_workers(find: Callable[[], bytes]) -> None:
    """Let the queues of this process have forks for processes."""
    from shardckpt.background import process

    process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=partial(ForkedWorker, find), DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def forked_here() -> Iterator[None]:
    """Let the queues of pytest's process, if it has torch, have forks until the generator goes on."""
    if not programs.HAS_ADDRESSES or "torch" not in sys.modules:
        yield
        return
    from shardckpt.background import process

    fork_workers(programs.address)
    yield
    process.subprocess = subprocess


def run_with(place: bytes, name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function of a rank, which saves by a format where it names no strategy; its queues have forks."""
    if place:
        fork_workers(lambda: place)
    return backends.run_with(name, function, *args)


__all__ = ["ForkedWorker", "fork_workers", "forked_here", "run_with"]
