"""Saves behind the training as a tracer can follow them: calls of a thread have numbers of their own, processes fork.

strace counts the calls of each thread from 1. Where it is told to fail "the third fsync", it fails that of whichever
thread comes to its third one first. So a thread that saves makes calls of each kind in advance, on a file in memory,
and no number of its calls is one of the main thread's; where one of the main thread's is to fail, no other is traced.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.background import process, worker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

#: Ways of a save: in the foreground, by a request that is executed there, by a queue's thread or process.
WAYS = ("foreground", "request", "thread", "process")
START_TIMEOUT = 60.0
#: More than the main thread makes of any kind.
_ADVANCE = 200


def save_in(way: str, target: Path, state: dict[str, Any], *, overwrite: bool) -> None:
    """Save in one of the ways."""
    if way not in WAYS[1:]:
        dist_checkpointing.save(state, target, overwrite=overwrite)
        return
    request = dist_checkpointing.save(state, target, async_sharded_save=True, overwrite=overwrite)
    if request is None or request.async_fn is None:
        raise SystemExit("no request")
    if way == "request":
        request.execute_sync()
        return
    if way == "thread":
        request = request._replace(async_fn=partial(_run_in_advance, request.async_fn))
    queue = AsyncCallsQueue(persistent=way == "process")
    try:
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    finally:
        queue.close()


def _run_in_advance(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a request's function after many calls of each kind."""
    _make_calls()
    return function(*args, **kwargs)


def _make_calls() -> None:
    """Make calls of the kinds that a save makes; what fails counts as well."""
    descriptor = os.memfd_create("advance")
    nowhere = "/dev/null/nothing"
    calls: Iterable[Callable[[], Any]] = (
        partial(os.close, 1 << 20),
        partial(os.open, nowhere, os.O_RDONLY),
        partial(os.fstat, descriptor),
        partial(os.lseek, descriptor, 0, os.SEEK_SET),
        partial(os.write, descriptor, b""),
        partial(os.writev, descriptor, [b""]),
        partial(os.pwrite, descriptor, b"", 0),
        partial(os.pwritev, descriptor, [b""], 0),
        partial(os.pread, descriptor, 1, 0),
        partial(os.read, descriptor, 1),
        partial(os.posix_fallocate, descriptor, 0, 1),
        partial(os.ftruncate, descriptor, 0),
        partial(os.fsync, descriptor),
        partial(os.mkdir, nowhere),
        partial(os.rmdir, nowhere),
        partial(os.unlink, nowhere),
        partial(os.rename, nowhere, f"{nowhere}/2"),
        partial(os.link, nowhere, f"{nowhere}/2"),
        partial(os.readlink, nowhere),
        partial(os.statvfs, nowhere),
        partial(os.fstatvfs, descriptor),
        partial(os.access, nowhere, os.R_OK),
    )
    for call in calls:
        for _ in range(_ADVANCE):
            with suppress(OSError):
                call()
    os.close(descriptor)


class ForkedWorker:
    """A queue's process that is forked, not started anew: what it does is the same, and importing torch takes seconds.

    Args:
        told: Takes its process id, once it has stopped itself for strace; None: it does not stop.
        command: The new interpreter's; unused.
        options: ``pass_fds``, as ``Popen`` takes it.
    """

    def __init__(self, told: Path | None, command: list[str], **options: Any) -> None:
        parent, (pipe,) = os.getpid(), options["pass_fds"]
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self.pid = os.fork()
        if not self.pid:
            os.closerange(3, pipe)  # the training's end of the pipe, too
            os.closerange(pipe + 1, 1024)
            if told is not None:
                os.kill(os.getpid(), signal.SIGSTOP)
            try:
                worker.main(pipe, parent)
            finally:
                os._exit(0)
        if told is not None:
            os.waitpid(self.pid, os.WUNTRACED)
            told.with_suffix(".new").write_text(str(self.pid))
            told.with_suffix(".new").rename(told)

    def kill(self) -> None:
        """Kill it, if it lives."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""
        limit = time.monotonic() + (timeout or START_TIMEOUT)
        while (code := self.poll()) is None:
            if time.monotonic() > limit:
                raise subprocess.TimeoutExpired("worker", timeout or START_TIMEOUT)
            time.sleep(0.002)
        return code

    def poll(self) -> int | None:
        """Look whether it has ended."""
        with self._lock:  # the thread that listens asks, too
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode


def fork_workers(told: Path | None = None) -> None:
    """Let the queues of this process, a fork, fork their processes."""
    process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=partial(ForkedWorker, told), DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
