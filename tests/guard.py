"""A guard of the default tier: what starts a process, uses the network or sleeps belongs in the CI tier.

The interpreter announces each of these calls to a hook, whoever makes it. What is refused is raised where it is called,
and once more at the end of the test's phase, since the product may have caught it.
"""

from __future__ import annotations

import socket
import sys
import time
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiers import get_tier

with suppress(ImportError):
    # binds a socket as it is imported, which is not the doing of the test that is the first to name a store
    import urllib3.util.connection  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

#: Seconds that the code of a default test may sleep.
LONGEST_SLEEP = 0.05
_TESTS = str(Path(__file__).parent)
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"}
_CONNECTIONS = {"socket.bind", "socket.connect", "socket.sendto"}


class CITierError(BaseException):
    """A default test did what belongs in the CI tier; no ``except Exception`` of the product takes it for its own."""


_refused: list[CITierError] = []
_guarded: list[str] = []  # the test that runs now, if it is a default one


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None]:
    """Let the tensors that a module draws as it is imported not depend on the modules that came before."""
    _seed()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """Guard the fixtures of a test, which has the same random numbers each time, and no folder but ``tmp_path``."""
    with _guard(item):
        _seed()
        if _guarded and "disk" in item.fixturenames:  # type: ignore[attr-defined]
            _refuse("a folder on a disk")
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Guard a test."""
    with _guard(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    """Guard the ends of the fixtures of a test."""
    with _guard(item):
        return (yield)


def _seed() -> None:
    if "torch" in sys.modules:
        # torch.manual_seed takes a traceback for each kind of accelerator: a millisecond a test
        torch = sys.modules["torch"]
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)


@contextmanager
def _guard(item: pytest.Item) -> Iterator[None]:
    """Refuse while a phase of a default test runs, and raise at its end what was refused."""
    if get_tier(item) != "default":
        yield
        return
    _refused.clear()
    _guarded.append(item.nodeid)
    try:
        yield
    finally:
        _guarded.clear()
        if _refused:
            raise _refused[0]


def is_on() -> bool:
    """Return whether a default test runs."""
    return bool(_guarded)


def _refuse(what: str) -> None:
    error = CITierError(f"{what}: this belongs in tests/ci")
    _refused.append(error)
    raise error


def _hear(event: str, args: tuple[Any, ...]) -> None:
    """Refuse what the interpreter announces, as https://docs.python.org/3/library/audit_events.html lists it."""
    if not _guarded:
        return
    if event in _STARTS:
        _refuse(f"{event} {args[:2]}")
    elif event in _CONNECTIONS and args[0].family != getattr(socket, "AF_UNIX", None):
        _refuse(f"{event} {args[1]}")


def _start(process: BaseProcess) -> None:
    """Start a process of multiprocessing, which announces nothing."""
    if _guarded:
        _refuse(f"multiprocessing {process.name}")
    _start_anyway(process)


def _sleep(seconds: float) -> None:
    """Sleep, which Python announces since 3.13 only; the product may, for as long as it likes."""
    if _guarded and seconds > LONGEST_SLEEP and sys._getframe(1).f_code.co_filename.startswith(_TESTS):
        _refuse(f"time.sleep({seconds:g})")
    _sleep_anyway(seconds)


_start_anyway, _sleep_anyway = BaseProcess.start, time.sleep
BaseProcess.start, time.sleep = _start, _sleep  # type: ignore[method-assign]
sys.addaudithook(_hear)
