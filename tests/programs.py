"""Programs that start in milliseconds: forks of one process that has imported torch and shardckpt.

``run(code, *arguments)`` is ``subprocess.run([sys.executable, "-c", code, *arguments])`` without the two seconds that
importing takes. Output, exit status, signals and the end of the interpreter are those of any program. What a program
imports is not: a test of that starts an interpreter of its own. pytest's process does not fork: it has threads.
Other processes, ranks for instance, have theirs forked there, too: by ``connect``, to the ``address`` of pytest's.
"""

from __future__ import annotations

import gc
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests import backends
from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Whether sockets have names here that are no files.
HAS_ADDRESSES = sys.platform == "linux"
START_TIMEOUT = 120.0  # seconds
#: What the process imports before it forks.
PRELOADED = (
    "torch._dynamo",  # an optimizer's first step imports it, on each rank for a second
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "shardckpt_safetensors.load",
    "shardckpt_safetensors.save",
    "shardckpt_torch_dist.load",
    "shardckpt_torch_dist.save",
    "shardckpt.adapters",
    "shardckpt.async_save",
    "shardckpt.background.process",
    "shardckpt.engine",
    "shardckpt.manager",
)


class Request(NamedTuple):
    """A program to start: its code, or the file or module that has it."""

    code: str
    file: str
    module: str
    arguments: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    warnings_are_errors: bool


class Program:
    """A running program, with the methods of ``subprocess.Popen`` that tests need.

    Args:
        pid: Its process id.
        outputs: Where its standard output and error are read; one descriptor if both go to the same place.
    """

    def __init__(self, pid: int, outputs: list[int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._outputs = outputs

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Return standard output and error when nobody writes to them any more, and the program has ended."""
        limit = time.monotonic() + timeout
        found = dict.fromkeys(self._outputs, b"")
        with selectors.DefaultSelector() as selector:
            for descriptor in self._outputs:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                ready = selector.select(max(0.0, limit - time.monotonic()))
                if not ready:
                    self._give_up(timeout)
                for key, _ in ready:
                    data = os.read(key.fd, 1 << 16)
                    found[key.fd] += data
                    if not data:
                        selector.unregister(key.fd)
                        os.close(key.fd)
        self.returncode = _ask_for_end(self.pid, limit)
        if self.returncode is None:
            self._give_up(timeout)
        texts = [found[descriptor].decode() for descriptor in self._outputs]
        return texts[0], "".join(texts[1:])

    def _give_up(self, timeout: float) -> None:
        # it leads a group of its own, and nobody has reaped it: the number is still its own
        os.killpg(self.pid, signal.SIGKILL)
        raise subprocess.TimeoutExpired(str(self.pid), timeout)


def start(
    code: str = "",
    *arguments: str,
    file: str = "",
    module: str = "",
    text: str = "",
    cwd: Path | None = None,
    environment: dict[str, str] | None = None,
    warnings_are_errors: bool = False,
    one_output: bool = False,
) -> Program:
    """Start a program.

    Args:
        code: What it runs, as ``python -c`` does, unless a file or a module is named.
        *arguments: Its arguments.
        file: A script to run.
        module: A module to run, as ``python -m`` does.
        text: Its standard input.
        cwd: Its working directory; that of this process by default.
        environment: Variables beside those of this process.
        warnings_are_errors: As ``python -W error`` has it.
        one_output: Send standard error to where standard output goes.
    """
    variables = {**os.environ, **(environment or {})}
    request = Request(code, file, module, arguments, str(cwd or Path.cwd()), variables, warnings_are_errors)
    ends = [os.pipe() for _ in range(1 if one_output else 2)]
    with tempfile.TemporaryFile() as standard_input:
        standard_input.write(text.encode())
        standard_input.seek(0)
        pid = fork(_server(), request, [standard_input.fileno(), ends[0][1], ends[-1][1]])
    for _, writing in ends:
        os.close(writing)
    return Program(pid, [reading for reading, _ in ends])


def run(code: str = "", *arguments: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the options are those of :func:`start`."""
    program = start(code, *arguments, **options)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(arguments, program.returncode or 0, out, err)


def fork(server: Connection[Any, Any], request: Request, descriptors: Sequence[int]) -> int:
    """Have a program forked, with three standard descriptors, or the pipe of a worker as a fourth; return its pid."""
    sys.audit("os.fork")  # for tests.guard: it is another process that forks
    server.send((request, len(descriptors)))
    for descriptor in descriptors:
        send_handle(server, descriptor, None)
    pid: int = server.recv()
    return pid


def poll(server: Connection[Any, Any], pid: int) -> int | None:
    """Return the exit status of a fork, negative for a signal; None while it runs."""
    server.send(pid)
    code: int | None = server.recv()
    return code


_pipes: list[Connection[Any, Any]] = []
_started: list[tuple[Connection[Any, Any], bytes]] = []


def address() -> bytes:
    """Where the process that forks listens, which is started at the first use; empty where it cannot listen."""
    if not _started:
        ours, theirs = Pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            place = b""
            if HAS_ADDRESSES:
                listener.bind("")  # the system chooses a name, which is no file
                listener.listen(64)
                place = listener.getsockname()
            descriptors = [theirs.fileno(), listener.fileno()]
            subprocess.Popen(
                [sys.executable, "-m", "tests.programs", *map(str, descriptors)], cwd=ROOT, pass_fds=descriptors
            ).returncode = 0  # nobody waits for it: it ends when this end of the pipe is closed
        theirs.close()
        _started.append((ours, place))
    return _started[0][1]


def connect(place: bytes) -> Connection[Any, Any]:
    """Return another way to the process that forks, for any process; requests wait until it has imported torch."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(place)
        return Connection(client.detach())


def _server() -> Connection[Any, Any]:
    """Return the way of this process to the one that forks, which has imported torch then, and ends with this one."""
    if not _pipes:
        address()
        ours = _started[0][0]
        if not ours.poll(START_TIMEOUT):
            raise RuntimeError(f"tests.programs has not imported torch within {START_TIMEOUT:g} s")
        ours.recv()
        _pipes.append(ours)
    return _pipes[0]


def _ask_for_end(pid: int, limit: float) -> int | None:
    """Return the exit status, negative for a signal; None if the program has not ended in time."""
    server = _server()
    while True:
        code = poll(server, pid)
        if code is not None or time.monotonic() > limit:
            return code
        time.sleep(0.005)


def _serve(pipe: Connection[Any, Any], listener: socket.socket) -> Request | None:
    """Fork for every request, and return it in the fork; return None when pytest has ended, or asks no more."""
    with selectors.DefaultSelector() as selector:
        for each in (pipe, listener):
            selector.register(each, selectors.EVENT_READ)
        pipe.send("ready")
        while True:
            for key, _ in selector.select():
                client: Any = key.fileobj
                if client is listener:
                    selector.register(Connection(listener.accept()[0].detach()), selectors.EVENT_READ)
                    continue
                try:
                    request = _answer(client)
                except (EOFError, OSError):  # nobody asks there any more
                    if client is pipe:
                        return None
                    selector.unregister(client)
                    client.close()
                    continue
                if request is not None:
                    for ours in [each.fileobj for each in selector.get_map().values()]:
                        ours.close()  # type: ignore[union-attr]
                    return request


def _answer(client: Connection[Any, Any]) -> Request | None:
    """Answer a request; return it in a fork."""
    asked = client.recv()
    if isinstance(asked, int):
        ended, status = os.waitpid(asked, os.WNOHANG)
        client.send(os.waitstatus_to_exitcode(status) if ended else None)
        return None
    request, count = asked
    descriptors = [recv_handle(client) for _ in range(count)]
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        client.send(pid)
        return None
    os.setpgid(0, 0)
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if count > 3:  # a worker is told where its pipe is, and whose child it is
        return request._replace(arguments=(str(descriptors[3]), str(os.getppid()), *request.arguments[2:]))
    return request


def _become(request: Request) -> None:
    """Run the program in this fork, whose interpreter then ends as that of any program."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    tempfile.tempdir = None
    warnings.resetwarnings()
    if request.warnings_are_errors:
        warnings.simplefilter("error")
    sys.argv[:] = [request.file or "-c", *request.arguments]
    sys.path[0] = str(Path(request.file).parent) if request.file else ""
    backends.become_default()
    if request.module:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    if request.file:
        main.__file__ = request.file
    sys.modules["__main__"] = main
    code = Path(request.file).read_text() if request.file else request.code
    exec(compile(code, request.file or "<string>", "exec"), main.__dict__)


if __name__ == "__main__":
    for _name in PRELOADED:
        __import__(_name)
    gc.freeze()  # what is imported stays: a fork that ends must not look through it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest
    _request = _serve(Connection(int(sys.argv[1])), socket.socket(fileno=int(sys.argv[2])))
    if _request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(_request)
