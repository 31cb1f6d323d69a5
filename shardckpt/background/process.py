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
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt.distributed import ErrorReport, unpickled
from shardckpt.errors import CheckpointingException, RankFailedError

if TYPE_CHECKING:
    from shardckpt.background.request import AsyncRequest

#: Length of a call's number, with which it and its outcome begin.
NUMBER_BYTES = 8
#: Seconds that a process which was told to end may take.
_END_TIMEOUT = 5.0
#: The training process decides when this one ends: signals to all of a job's processes are for it. They are ignored
#: before anything slow is imported, and nothing is imported from the directory that the job happens to be in.
_PROGRAM = """
import signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
pipe, parent, *sys.path = sys.argv[1:]
from shardckpt.background.worker import main
main(int(pipe), int(parent))
"""


class Outcome(NamedTuple):
    """What a call came to."""

    result: Any
    failure: ErrorReport | None = None


class WorkerTraceback(Exception):
    """Where an error came from in another process; the cause of the error in this one."""


class WorkerProcess:
    """A child process; it ends when this process does."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        ours, theirs = socket.socketpair()
        paths = [path or str(Path.cwd()) for path in sys.path]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(self._owner), *paths],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._pipe = Connection(ours.detach())
        self._calls: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = False
        self._outbox: SimpleQueue[bytes] = SimpleQueue()
        targets = (self._listen, self._send)
        self._threads = [threading.Thread(target=t, name=f"shardckpt{t.__name__}", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it takes calls: a fork of the process that started it has to start its own."""
        return not self._ended and self._owner == os.getpid()

    def submit(self, request: AsyncRequest) -> Future[Any]:
        """Let it call the request's ``async_fn``; does not wait until the process takes it."""
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
        self._outbox.put(data)
        if self._ended:
            self._fail_all()
        return future

    def close(self, *, kill: bool) -> None:
        """End it: at once, or after the calls that it has."""
        if self._owner != os.getpid():
            return
        if kill:
            self._process.kill()
        for future in [] if kill else list(self._calls.values()):
            future.exception()
        self._outbox.put(b"")  # there are no more calls
        self._end()
        for thread in self._threads:  # one that lets go of a tensor while the interpreter ends would abort it
            if thread is not threading.current_thread():
                thread.join(_END_TIMEOUT)

    def _send(self) -> None:
        """Hand calls over as fast as the process takes them, until there are no more."""
        try:
            while data := self._outbox.get():
                self._pipe.send_bytes(data)
            self._pipe.send_bytes(b"")
        except OSError:
            self._process.kill()  # most likely it is dead already; now the listener hears of it in any case

    def _listen(self) -> None:
        """Hand out results until the process ends."""
        with suppress(EOFError, OSError):
            while True:
                data = self._pipe.recv_bytes()
                with self._lock:
                    future = self._calls.pop(int.from_bytes(data[:NUMBER_BYTES], "little"))
                _resolve(future, data[NUMBER_BYTES:], self.pid)
                del future  # and with it, all that the call was to save
        self._end()
        self._fail_all()
        self._outbox.put(b"")

    def _end(self) -> None:
        """Wait for its end, which is near."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT)
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # not even a kill ends who waits for a dead file server
            self._process.wait(_END_TIMEOUT)

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


def _resolve(future: Future[Any], data: bytes, pid: int) -> None:
    """Give a future the outcome that the process has sent."""
    try:
        outcome: Outcome = unpickled(data)
    except Exception as exc:  # noqa: BLE001 - any class may refuse in any way
        text = f"its result cannot be unpickled in the training process: {type(exc).__name__}: {exc}"
        error: CheckpointingException = RankFailedError(f"in process {pid}: {text}")
        error.__cause__ = exc
        future.set_exception(error)
        return
    if outcome.failure is None:
        future.set_result(outcome.result)
        return
    rebuilt = outcome.failure.rebuild(outcome.failure.message())
    error = RankFailedError(outcome.failure.message(named=True)) if rebuilt is None else rebuilt
    error.__cause__ = WorkerTraceback(f"\n{outcome.failure.traceback}")
    future.set_exception(error)


def _unpicklable(request: AsyncRequest, error: Exception) -> CheckpointingException:
    return CheckpointingException(
        f"the request for {request.async_fn!r} cannot be sent to a process ({type(error).__name__}: {error}); use "
        "AsyncCallsQueue(persistent=False), which works in a thread"
    )


__all__ = ["NUMBER_BYTES", "Outcome", "WorkerProcess"]
