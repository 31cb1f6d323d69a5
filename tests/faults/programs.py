"""Programs of this package, run in processes of their own: what they do must not happen in pytest's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests import programs
from tests.programs import ROOT

if TYPE_CHECKING:
    from pathlib import Path

needs_strace = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: faults of chosen system calls need it"
)
ONE_THREAD = {"SHARDCKPT_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}


def run_program(name: str, *arguments: str, text: str = "", timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """Run ``tests.faults.<name>`` with one thread for everything, in a fork of what has imported torch.

    Args:
        name: The module.
        *arguments: Its arguments.
        text: Its standard input.
        timeout: Seconds after which it is killed, and the test fails.
    """
    module = f"tests.faults.{name}"
    return programs.run("", *arguments, module=module, text=text, cwd=ROOT, environment=ONE_THREAD, timeout=timeout)


def ask(name: str, *arguments: object, text: str = "", timeout: float = 240) -> Any:
    """What a program has found, which it prints as JSON; the test is skipped where the machine does not permit it."""
    done = run_program(name, *map(str, arguments), text=text, timeout=timeout)
    for reason in ("strace did not attach", "mounting is not permitted"):
        if done.returncode and reason in done.stderr:
            pytest.skip(f"not on this machine: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])  # after what gloo itself prints in some builds of torch


def run_in_new_interpreter(
    name: str, *arguments: str, text: str = "", cwd: Path = ROOT, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run it as :func:`run_program` does, where it matters what has been imported, and when."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", f"tests.faults.{name}", *arguments],
        input=text,
        cwd=cwd,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
