"""A child process that runs functions one after the other; the end of its pipe shows its death at once."""

from __future__ import annotations

import itertools
import logging
import os
import signal
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

from shardckpt.distributed.pickling import pickle_parts, unpickle_trusted
from shardckpt.errors import CheckpointingException, RankFailedError
from shardckpt.plugins.manager import get_plugin_manager

if TYPE_CHECKING:
    from shardckpt.background.request import AsyncRequest
    from shardckpt.distributed.error_report import ErrorReport

logger = logging.getLogger(__name__)

#: Bytes of an integer in a message. A call is several messages: the first has its number and the count of the others,
#: which are the parts of its pickle. An outcome is one message: the call's number, then a pickle.
NUMBER_BYTES = 8
#: In the place of a call's number: the message is an event of the child's save, for the plugins of this process.
EVENT_NUMBER = b"\xff" * NUMBER_BYTES
#: Seconds that the process may take to end after it was asked to.
_END_TIMEOUT = 5.0
#: The child's program. First it takes over the parent's sys.path: python -c would import a signal.py of the current
#: directory. A scheduler may signal all processes of a job (Ctrl-C, preemption): the child ignores that, because the
#: training process decides when the child ends. It does so before the slow imports.
_PROGRAM = """
import sys
pipe, parent, *sys.path = sys.argv[1:]
import signal
for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
from shardckpt.background.worker import main
main(int(pipe), int(parent))
"""


class Outcome(NamedTuple):
    """The result of a call, or the report of its error."""

    result: Any
    failure: ErrorReport | None = None


class WorkerTraceback(Exception):
    """The traceback of an error in the child process; the cause of the error that this process raises."""


class WorkerProcess:
    """A child process, which ends with this process."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        # a new interpreter, not a fork: CUDA, and the threads of gloo and torch, do not survive one
        ours, theirs = socket.socketpair()
        paths = [path or str(Path.cwd()) for path in sys.path]
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own module
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(self._owner), *paths],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._pipe = Connection(ours.detach())
        #: The calls without an outcome. The child maps the tensors of a request, so it is kept until it has run.
        self._calls: dict[int, tuple[AsyncRequest, Future[Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = False
        self._outbox: SimpleQueue[tuple[int, list[bytes | memoryview]] | None] = SimpleQueue()
        targets = (self._listen, self._send)
        self._threads = [threading.Thread(target=t, name=f"shardckpt{t.__name__}", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it takes calls; False in a fork of the process that started it, which must start its own."""
        return not self._ended and self._owner == os.getpid()

    def warn_of_end(self, name: str) -> None:
        """Log that the child has ended, and that another one writes the request of this name."""
        if self._owner == os.getpid():
            logger.warning(
                "the process that saves in the background %s, and a new one is started for %s",
                self._describe_end(),
                name,
            )

    def submit(self, request: AsyncRequest) -> Future[Any]:
        """Let the child call the request's ``async_fn``; return the Future of its result or error without waiting."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        number = next(self._numbers)
        try:
            parts = pickle_parts((request.async_fn, request.async_fn_args, request.async_fn_kwargs))
        except Exception as exc:  # noqa: BLE001 - pickling may raise anything
            future.set_exception(
                CheckpointingException(
                    f"the request for {request.async_fn!r} cannot be sent to a process ({type(exc).__name__}: {exc}); "
                    "use a thread: AsyncCallsQueue(persistent=False) or CheckpointConfig(async_mode='async')"
                )
            )
            return future
        with self._lock:
            self._calls[number] = request, future
        self._outbox.put((number, parts))
        if self._ended:  # perhaps just after the listener had failed all calls
            self._fail_all()
        return future

    def close(self, *, abort: bool) -> None:
        """End the child: at once with ``abort``, else after its calls."""
        if self._owner != os.getpid():
            return
        if abort:
            self._process.kill()
        else:
            for _, future in list(self._calls.values()):
                future.exception()  # waits for the outcome
        self._outbox.put(None)  # asks the child to end
        self._end()
        for thread in self._threads:  # a thread that frees a tensor during the interpreter's exit would abort it
            if thread is not threading.current_thread():
                thread.join(_END_TIMEOUT)

    def _send(self) -> None:
        """Send calls as fast as the child reads them, in a thread: a full pipe must not block the training."""
        try:
            while (call := self._outbox.get()) is not None:
                number, parts = call
                self._pipe.send_bytes(b"".join(each.to_bytes(NUMBER_BYTES, "little") for each in (number, len(parts))))
                for part in parts:
                    self._pipe.send_bytes(part)
                del call, parts, part  # until the next call they would keep the sent values
            self._pipe.send_bytes(b"")
        except OSError:
            self._process.kill()  # probably dead already; now the listener's pipe ends for certain

    def _listen(self) -> None:
        """Resolve the futures with the outcomes that arrive, and pass events to plugins, until the child ends."""
        with suppress(EOFError, OSError):
            while True:
                data = self._pipe.recv_bytes()
                if data.startswith(EVENT_NUMBER):
                    get_plugin_manager().report(unpickle_trusted(data[NUMBER_BYTES:]))
                    continue
                with self._lock:
                    future = self._calls.pop(int.from_bytes(data[:NUMBER_BYTES], "little"))[1]
                _resolve(future, data[NUMBER_BYTES:], self.pid)
                del future  # it may hold the last reference to the staged tensors
        self._end()
        self._fail_all()
        self._outbox.put(None)

    def _end(self) -> None:
        """Wait for the child's end, and kill it if that takes too long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT)
            return
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits for a dead file server survives even SIGKILL
            self._process.wait(_END_TIMEOUT)

    def _fail_all(self) -> None:
        """Fail every call without an outcome: the child is dead."""
        with self._lock:
            self._ended = True
            waiting, self._calls = [future for _, future in self._calls.values()], {}
        for future in waiting:
            text = f"the process that saves in the background {self._describe_end()} before it had written its files"
            future.set_exception(RankFailedError(f"{text}; the next save starts a new one"))

    def _describe_end(self) -> str:
        code = self._process.poll()
        if code is None:
            return f"(process {self.pid}) has stopped answering"
        if code >= 0:
            return f"(process {self.pid}) ended with exit code {code}"
        why = ", as the kernel does where memory runs out: see dmesg" if code == -signal.SIGKILL else ""
        return f"(process {self.pid}) was ended by signal {-code} ({signal.strsignal(-code)}{why})"


def _resolve(future: Future[Any], data: bytes, pid: int) -> None:
    """Set a future to the outcome that the child has sent."""
    try:
        result, failure = unpickle_trusted(data)
    except Exception as exc:  # noqa: BLE001 - unpickling may raise anything
        text = f"its result cannot be unpickled in the training process: {type(exc).__name__}: {exc}"
        error: CheckpointingException = RankFailedError(f"in process {pid}: {text}")
        error.__cause__ = exc
        future.set_exception(error)
        return
    if failure is None:
        future.set_result(result)
        return
    error = failure.to_error()
    error.__cause__ = WorkerTraceback(f"\n{failure.traceback}")
    future.set_exception(error)
