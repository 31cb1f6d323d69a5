"""A process that runs functions one after the other, and whose death is noticed at once: its pipe ends with it."""

from __future__ import annotations

import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt import errors
from shardckpt.errors import CheckpointingException, RankFailedError

if TYPE_CHECKING:
    from shardckpt.background.request import AsyncRequest

#: Length of a call's number, with which it begins.
NUMBER_BYTES = 8
#: Seconds that a process which was told to end may take.
_END_TIMEOUT = 5.0


class Outcome(NamedTuple):
    """What a call came to: its result, or the class and message of its error."""

    number: int
    result: Any
    kind: str = ""
    message: str = ""


class WorkerProcess:
    """A child process; it ends when this process does."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = "import sys; from shardckpt.background.worker import main; main(int(sys.argv[1]))"
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                [sys.executable, "-c", code, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            )
        self._pipe = Connection(ours.detach())
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = False
        threading.Thread(target=self._listen, name="shardckpt-listener", daemon=True).start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it takes calls."""
        return not self._ended

    def submit(self, request: AsyncRequest) -> Future[Any]:
        """Let it call the request's ``async_fn``."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        try:
            data = number.to_bytes(NUMBER_BYTES, "little")
            data += pickle.dumps((request.async_fn, request.async_fn_args, request.async_fn_kwargs))
        except Exception as exc:  # noqa: BLE001 - any class may refuse in any way
            future.set_exception(_unpicklable(request, exc))
            return future
        with self._lock:
            self._calls[number] = future
            ended = self._ended
        try:
            if not ended:
                self._pipe.send_bytes(data)
                return future
        except OSError:
            pass  # it has just died
        self._fail_all()
        return future

    def close(self, *, kill: bool) -> None:
        """End it: at once, or after the calls that it has."""
        if kill:
            self._process.kill()
        else:
            for future in list(self._calls.values()):
                future.exception()
            with suppress(OSError):
                self._pipe.send_bytes(b"")  # there are no more calls
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _listen(self) -> None:
        """Hand out results until the process ends."""
        while True:
            try:
                outcome: Outcome = self._pipe.recv()
            except (EOFError, OSError):
                break
            with self._lock:
                future = self._calls.pop(outcome.number)
            _settle(future, outcome, self.pid)
        self._process.wait()
        self._fail_all()

    def _fail_all(self) -> None:
        """Let every call that waits hear that the process is dead."""
        with self._lock:
            self._ended = True
            waiting, self._calls = list(self._calls.values()), {}
        for future in waiting:
            future.set_exception(RankFailedError(f"the process that saves in the background {self._epitaph()}"))

    def _epitaph(self) -> str:
        code = self._process.poll()
        if code is None:
            return f"(process {self.pid}) does not answer any more"
        cause = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"(process {self.pid}) {cause} before it had written its files; the next save starts a new one"


def _settle(future: Future[Any], outcome: Outcome, pid: int) -> None:
    if not outcome.message:
        future.set_result(outcome.result)
        return
    kind = getattr(errors, outcome.kind, RankFailedError)
    future.set_exception(kind(f"in process {pid}: {outcome.message}"))


def _unpicklable(request: AsyncRequest, error: Exception) -> CheckpointingException:
    return CheckpointingException(
        f"the request for {request.async_fn!r} cannot be sent to a process ({type(error).__name__}: {error}); use "
        "AsyncCallsQueue(persistent=False), which works in a thread"
    )


__all__ = ["NUMBER_BYTES", "Outcome", "WorkerProcess"]
