"""What the tests of benchmarks share."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.tree import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


TINY = ("--scale", "0.0001", "--rounds", "1")


class Folders(NamedTuple):
    """Where a run writes checkpoints, and where all its processes write what else they have to."""

    disk: Path
    temporary: Path

    def left(self) -> list[str]:
        """Files that are there, and processes that live."""
        return [*map(str, self.disk.iterdir()), *map(str, self.temporary.iterdir()), *self.processes()]

    def processes(self) -> list[str]:
        """Those whose temporary files go there."""
        return [process.name for process in Path("/proc").iterdir() if self._owns(process)]

    def _owns(self, process: Path) -> bool:
        try:
            return process.name.isdigit() and f"TMPDIR={self.temporary}".encode() in (process / "environ").read_bytes()
        except OSError:  # it has ended, or is another user's
            return False


@pytest.fixture
def folders(tmp_path: Path) -> Iterator[Folders]:
    """Empty ones; the second has a short path, for Megatron makes sockets there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with tempfile.TemporaryDirectory(prefix="b-", dir="/tmp") as temporary:
        yield Folders(disk, Path(temporary))


def run_benchmarks(folders: Folders, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run that has left nothing on the disk and no process."""
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        *TINY,
        *options,
        "--deadline",
        "200",
        "--directory",
        str(folders.disk),
    ]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folders.temporary), **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert not folders.left()
    return done
