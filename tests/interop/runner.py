"""Releases of megatron-core, each in a folder and in processes of its own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
INSTALL_TIMEOUT = 240.0  # seconds
END_TIMEOUT = 30.0  # seconds
NEEDS = (
    "packaging",
    "einops",
    "psutil",
    "setuptools<81",
)  # what importing it takes; torch and numpy are the tests' own


class MegatronError(Exception):
    """Megatron raised, or could not be had."""


class Megatron:
    """Four ranks with one release of megatron-core: ``megatron.run(4, "load", path)``.

    Args:
        release: Its version on PyPI.
        root: Where releases are kept; what is there already is not downloaded again.
        log: Where the standard error of the ranks goes.
    """

    def __init__(self, release: str, root: Path, log: Path) -> None:
        sites = [
            installed(f"megatron-core-{release}", [f"megatron-core=={release}"], root),
            installed("needs", NEEDS, root),
        ]
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
        try:
            failed = self._process.wait(END_TIMEOUT) != 0
        except subprocess.TimeoutExpired:
            failed = True
        if failed:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads a session of its own
        self._process.wait()


def installed(name: str, packages: Sequence[str], root: Path) -> Path:
    """A folder with packages and nothing that they depend on, from PyPI unless it is in ``root`` already."""
    site = root / name
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker may be at it: two at once take longer than two in turn
        return site if site.is_dir() else _install(site, packages)


def _install(site: Path, packages: Sequence[str]) -> Path:
    with tempfile.TemporaryDirectory(dir=site.parent) as scratch:
        target = Path(scratch, "site")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--disable-pip-version-check", "--target", str(target), *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT, check=False)
        if done.returncode:
            raise MegatronError(f"pip could not install {' '.join(packages)}: {done.stderr[-2000:]}")
        try:
            target.rename(site)
        except OSError:
            if not site.is_dir():  # else a benchmark has installed the same meanwhile, without the lock
                raise
    return site


__all__ = ["Megatron", "MegatronError"]
