"""Releases of megatron-core, each in a folder and in processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

END_TIMEOUT = 30.0  # seconds


class MegatronError(Exception):
    """Megatron raised, or ended."""


class Megatron:
    """Four ranks with one release of megatron-core: ``megatron.run(4, "load", path)``.

    Args:
        release: Its version on PyPI.
        sites: The folders with the release and with what importing it takes.
        log: Where the standard error of the ranks goes.
    """

    def __init__(self, release: str, sites: Sequence[Path], log: Path) -> None:
        self._log = log
        command = [sys.executable, "-m", "tests.interop.megatron_script"]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sites))},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self.run(1, "release", release)

    def run(self, world: int, action: str, *arguments: str) -> None:
        """Do an action of ``megatron_script`` on ranks 0 to ``world`` - 1; MegatronError if any raised."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise MegatronError("the pipes are gone")
        stdin.write(json.dumps([world, action, arguments]) + "\n")
        stdin.flush()
        answer = stdout.readline()
        if not answer:
            raise MegatronError(f"the process ended: {self._log.read_text()[-4000:]}")
        failures = [f"rank {rank}: {trace}" for rank, trace in enumerate(json.loads(answer)) if trace is not None]
        if failures:
            raise MegatronError("\n".join(failures) + self._log.read_text()[-4000:])

    def close(self) -> None:
        """End the ranks."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT)
        # it leads a session of its own; a rank that died has left the processes that Megatron's save had started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


__all__ = ["Megatron", "MegatronError"]
