"""Programs of this package, run in processes of their own: what they do must not happen in pytest's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_program(
    name: str, *arguments: str, text: str = "", cwd: Path = ROOT, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run ``tests.faults.<name>`` with one thread for everything.

    Args:
        name: The module.
        *arguments: Its arguments.
        text: Its standard input.
        cwd: Its working directory.
        timeout: Seconds after which it is killed, and the test fails.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    threads = {"SHARDCKPT_IO_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", f"tests.faults.{name}", *arguments],
        input=text,
        cwd=cwd,
        env={**os.environ, **threads, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
