"""Programs that start in milliseconds: forks of one process that has imported torch and shardckpt.

``run(code, *arguments)`` is ``subprocess.run([sys.executable, "-c", code, *arguments])`` without the two seconds that
importing takes. Output, exit status, signals and the end of the interpreter are those of any program. What a program
imports is not: a test of that starts an interpreter of its own. pytest's process does not fork: it has threads.
"""

from __future__ import annotations

import gc
import os
import runpy
import selectors
import signal
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
from typing import Any, NamedTuple

from tests import backends

ROOT = Path(__file__).parents[1]
START_TIMEOUT = 120.0  # seconds
#: What the process imports before it forks.
PRELOADED = (
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "shardckpt_safetensors.load",
    "shardckpt_safetensors.save",
    "shardckpt_torch_dist",
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
    pipe = _server()
    variables = {**os.environ, **(environment or {})}
    request = Request(code, file, module, arguments, str(cwd or Path.cwd()), variables, warnings_are_errors)
    ends = [os.pipe() for _ in range(1 if one_output else 2)]
    with tempfile.TemporaryFile() as standard_input:
        standard_input.write(text.encode())
        standard_input.seek(0)
        pipe.send(request)
        for descriptor in (standard_input.fileno(), ends[0][1], ends[-1][1]):
            send_handle(pipe, descriptor, None)
        pid = pipe.recv()
    for _, writing in ends:
        os.close(writing)
    return Program(pid, [reading for reading, _ in ends])


def run(code: str = "", *arguments: str, timeout: float = 60, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; the options are those of :func:`start`."""
    program = start(code, *arguments, **options)
    out, err = program.communicate(timeout)
    return subprocess.CompletedProcess(arguments, program.returncode or 0, out, err)


_pipes: list[Connection[Any, Any]] = []


def _server() -> Connection[Any, Any]:
    """Return the way to the process that forks, which is started at the first use, and ends with this one."""
    if not _pipes:
        ours, theirs = Pipe()
        subprocess.Popen(
            [sys.executable, "-m", "tests.programs", str(theirs.fileno())], cwd=ROOT, pass_fds=[theirs.fileno()]
        ).returncode = 0  # nobody waits for it: it ends when this end of the pipe is closed
        theirs.close()
        if not ours.poll(START_TIMEOUT):
            raise RuntimeError(f"tests.programs has not imported torch within {START_TIMEOUT:g} s")
        ours.recv()
        _pipes.append(ours)
    return _pipes[0]


def _ask_for_end(pid: int, limit: float) -> int | None:
    """Return the exit status, negative for a signal; None if the program has not ended in time."""
    pipe = _server()
    while True:
        pipe.send(pid)
        code: int | None = pipe.recv()
        if code is not None or time.monotonic() > limit:
            return code
        time.sleep(0.005)


def _serve(pipe: Connection[Any, Any]) -> Request | None:
    """Fork for every request, and return it in the fork; return None when nobody asks any more."""
    pipe.send("ready")
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return None
        if isinstance(asked, int):
            ended, status = os.waitpid(asked, os.WNOHANG)
            pipe.send(os.waitstatus_to_exitcode(status) if ended else None)
            continue
        descriptors = [recv_handle(pipe) for _ in range(3)]
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        if not pid:
            pipe.close()
            return asked
        pipe.send(pid)


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
    _request = _serve(Connection(int(sys.argv[1])))
    if _request is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(_request)
