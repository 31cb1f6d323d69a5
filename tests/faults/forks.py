"""Children of a process that has imported torch: forking costs milliseconds where starting anew costs seconds.

Only programs that pytest starts fork: pytest's own process has threads.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path


def fork(function: Callable[[], None], *, stopped: bool = False) -> int:
    """The process id of a child that runs the function; a stopped one waits for SIGCONT before."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _run(function, stopped=stopped)
    if stopped:
        os.waitpid(pid, os.WUNTRACED)
    return pid


def wait(pids: Iterable[int], seconds: float) -> dict[int, int | None]:
    """Wait status by process id; None for those that had to be killed when the time was over."""
    left, found = set(pids), dict[int, "int | None"]()
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.remove(pid)
                found[pid] = status
        time.sleep(0.002)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found[pid] = None
    return found


class Child:
    """A child of this process, with the methods of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        with self._lock:  # the thread that listens to a queue's process asks, too
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        """Its exit code, once it has ended."""
        limit = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.002)
        return code

    def kill(self) -> None:
        """End it, if it lives."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def kill_at_random(pids: Sequence[int], chance: random.Random) -> None:
    """Kill all of these children at once, or one of them a moment before the others, and wait for their ends."""
    first = chance.choice([*pids, None])
    if first is not None:
        os.kill(first, signal.SIGKILL)
        time.sleep(chance.uniform(0, 0.1))
    for pid in pids:
        if pid != first:
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def report_all(functions: Sequence[Callable[[], Any]], folder: Path, at_a_time: int) -> list[Any]:
    """What each of the functions returns, so many of them at a time, each in a child: most of their time is waiting.

    Args:
        functions: What they return is JSON.
        folder: Takes the results on their way.
        at_a_time: Number of children.
    """
    numbers: dict[int, int] = {}
    for number, function in enumerate(functions):
        if len(numbers) == at_a_time:
            _end_one(numbers)
        report = folder / f"report{number}"
        pid = fork(lambda report=report, function=function: report.write_text(json.dumps(function())) and None)  # type: ignore[misc]
        numbers[pid] = number
    while numbers:
        _end_one(numbers)
    return [json.loads((folder / f"report{number}").read_text()) for number in range(len(functions))]


def _end_one(numbers: dict[int, int]) -> None:
    """Wait for one of the children, and take it from their numbers."""
    pid, status = os.wait()
    number = numbers.pop(pid)
    if status:
        raise ChildProcessError(f"the child of number {number} ended with status {status}: see above")


def _run(function: Callable[[], None], *, stopped: bool) -> None:
    status = 1
    try:
        if stopped:
            os.kill(os.getpid(), signal.SIGSTOP)
        function()
        status = 0
    except BaseException:  # noqa: BLE001 - a child never returns into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
