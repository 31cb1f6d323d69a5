"""What the tests of process share."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from shardckpt.background.process import WorkerProcess
from tests import programs

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    """A process that takes calls."""
    process = WorkerProcess()
    yield process
    process.close(abort=False)


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    return programs.run(textwrap.dedent(program), cwd=programs.ROOT)
