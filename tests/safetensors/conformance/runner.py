"""Run a reader on directories, one process each, and measure it: CPU time and memory above those of its start."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

#: What an answer may cost above the start of the process: seconds of CPU, and bytes of memory.
CPU_LIMIT, MEMORY_LIMIT = 1.0, 200_000_000
_TIMEOUT = 60
#: How often an answer that took too much is asked for again: on a busy machine the same work takes more CPU time.
_TRIES = 4


class Run(NamedTuple):
    """What a reader did.

    Attributes:
        line: The JSON line that it printed; without a verdict if it printed none.
        cpu: Seconds of CPU, in the user's mode and the kernel's.
        peak: Its largest resident memory in bytes. It is never less than the runner's own, which has few imports.
    """

    line: dict[str, Any]
    cpu: float
    peak: int

    def find_excess(self, start: Run) -> str:
        """Return what it took too much of, compared with a process that found little to read; or ``""``."""
        cpu, peak = self.cpu - start.cpu, self.peak - start.peak
        if cpu > CPU_LIMIT or peak > MEMORY_LIMIT:
            return f"took {cpu:.2f} s and {peak / 1e6:.0f} MB"
        return ""


def run_reader(command: Sequence[str], directory: Path) -> Run:
    """Run a reader on one directory."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*command, str(directory)], stdout=output, stderr=subprocess.DEVNULL)
        timer = threading.Timer(_TIMEOUT, process.kill)
        timer.start()
        try:
            _, status, usage = os.wait4(process.pid, 0)
        finally:
            timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read().decode(errors="replace").splitlines()
    return Run(
        _parse(printed[-1] if printed else "", process.returncode),
        usage.ru_utime + usage.ru_stime,
        usage.ru_maxrss * 1024,
    )


def run_within_limits(command: Sequence[str], directory: Path, start: Run) -> Run:
    """Run a reader on one directory, again if it took too much: what it took least counts."""
    run = run_reader(command, directory)
    for _ in range(_TRIES - 1):
        if not run.find_excess(start):
            break
        again = run_reader(command, directory)
        run = Run(again.line, min(run.cpu, again.cpu), min(run.peak, again.peak))
    return run


def measure_start(command: Sequence[str], directory: Path) -> Run:
    """Return what the command takes where there is little to read, after all imports: the least of three runs."""
    runs = [run_reader(command, directory) for _ in range(3)]
    return Run(runs[0].line, min(run.cpu for run in runs), min(run.peak for run in runs))


def _parse(text: str, code: int) -> dict[str, Any]:
    try:
        line = json.loads(text)
        expected = {"valid": 0, "invalid": 1}[line["verdict"]]
    except (ValueError, TypeError, KeyError):
        return {"why": f"exit status {code}, no verdict: {text:.200}"}
    if code != expected:
        return {"why": f"exit status {code} beside the verdict {line['verdict']}"}
    return dict(line)
