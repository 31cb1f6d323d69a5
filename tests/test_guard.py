"""The guard of the default tier, by what it refuses in a default test."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess  # noqa: TID251 - to be refused
import sys
import time  # noqa: TID251 - to be refused
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from tests import guard
from tests.guard import CITierError

if TYPE_CHECKING:
    from collections.abc import Callable


def _open(method: str, port: int) -> None:
    with socket.socket() as opened:
        getattr(opened, method)(("127.0.0.1", port))


REFUSED: dict[str, Callable[[], object]] = {
    "subprocess.Popen": lambda: subprocess.Popen(["true"]),
    "os.fork": os.fork,
    "os.system": lambda: os.system("true"),
    "multiprocessing": lambda: multiprocessing.get_context("spawn").Process(target=print).start(),
    "socket.connect": lambda: _open("connect", 9),
    "socket.bind": lambda: _open("bind", 0),
    "time.sleep": lambda: time.sleep(1),
}


def test_what_belongs_in_the_ci_tier_is_refused() -> None:
    """A process, a connection and a long sleep are errors that name the call and the mark."""
    for name, act in REFUSED.items():
        with pytest.raises(CITierError, match=rf"^{name}.*: this belongs in tests/ci$"):
            act()
        assert len(guard._refused) == 1
        guard._refused.clear()


def test_what_is_swallowed_fails_the_test(request: pytest.FixtureRequest) -> None:
    """An error that nobody has seen is raised at the end of the test's phase."""
    with pytest.raises(CITierError, match=r"^os\.fork"), guard._guard(request.node), suppress(CITierError):
        os.fork()
    guard._refused.clear()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere each socket of this machine is a file")
def test_what_is_local_passes() -> None:
    """Sockets of this machine that are no network, and short sleeps, are allowed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")
    time.sleep(0.001)
