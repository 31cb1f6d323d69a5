"""Saves behind the training as a tracer can follow them: calls of a thread have numbers of their own, processes fork.

strace counts the calls of each thread from 1. Where it is told to fail "the third fsync", it fails that of whichever
thread comes to its third one first. So a thread that saves makes calls of each kind in advance, on a file in memory,
and no number of its calls is one of the main thread's; where one of the main thread's is to fail, no other is traced.
"""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from shardckpt import dist_checkpointing
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.background import process, worker
from tests.faults.forks import Child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

START_TIMEOUT = 60.0
#: More than the main thread makes of any kind.
_ADVANCE = 200


def save_in(way: str, target: Path, state: dict[str, Any], *, overwrite: bool) -> None:
    """Save by a ``request`` that is executed here, or by a queue's ``thread`` or ``process``."""
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
    make_calls()
    return function(*args, **kwargs)


def make_calls() -> None:
    """Make calls of the kinds that a save makes, in a thread's advance; what fails counts as well."""
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


def _fork_worker(told: Path | None, command: list[str], **options: Any) -> Child:
    """Fork a queue's process, not start it anew: what it does is the same, and importing torch takes seconds.

    Args:
        told: Takes its process id, once it has stopped itself for strace; None: it does not stop.
        command: The new interpreter's; unused.
        options: ``pass_fds``, as ``Popen`` takes it.
    """
    parent, (pipe,) = os.getpid(), options["pass_fds"]
    pid = os.fork()
    if not pid:
        os.closerange(3, pipe)  # the training's end of the pipe, too
        os.closerange(pipe + 1, 1024)
        if told is not None:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            worker.main(pipe, parent)
        finally:
            os._exit(0)
    if told is not None:
        os.waitpid(pid, os.WUNTRACED)
        told.with_suffix(".new").write_text(str(pid))
        told.with_suffix(".new").rename(told)
    return Child(pid)


def fork_workers(told: Path | None = None) -> None:
    """Let the queues of this process, a fork, fork their processes."""
    process.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=partial(_fork_worker, told), DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
