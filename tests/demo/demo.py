"""What the tests of demo share."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

TIME_LIMIT = 240.0


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")


#: Of a whole demo, eleven starts of a process: .ci/run runs it first, by the README's command, which fails if it does.
report = pytest.mark.proof


@dataclass(frozen=True)
class Demo:
    """A demo that has ended."""

    code: int
    out: str
    err: str

    def rows(self, title: str) -> list[list[str]]:
        """The cells of the table under a title."""
        lines = self.out[self.out.index(title) :].splitlines()[3:]
        end = next((number for number, line in enumerate(lines) if not re.search(r"\S {2,}\S", line)), len(lines))
        return [re.split(r" {2,}", line.strip()) for line in lines[:end]]


def demo_command(*arguments: str) -> list[str]:
    """Return the command of the demo."""
    return [sys.executable, "-m", "shardckpt", "demo", *arguments]


def run_demo(*arguments: str, **environment: str) -> Demo:
    """Run the demo to its end."""
    done = subprocess.run(
        demo_command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        env=os.environ | environment,
        check=False,
    )
    return Demo(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the demo of this module keeps."""
    return tmp_path_factory.mktemp("demo") / "kept"


@pytest.fixture(scope="module")
def demo(place: Path) -> Demo:
    """One demo for all tests of its report, where numpy is absent: torch warns then, and shardckpt never needs it."""
    (place.parent / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    return run_demo("--dir", str(place), PYTHONPATH=str(place.parent))


def started(place: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A demo with its temporary files below a place, and the process ids of its four ranks."""
    demo = subprocess.Popen(
        demo_command(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(place)},
    )
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    limit = time.monotonic() + 120
    while len(found := children.read_text().split()) < 4:
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < limit, found
        time.sleep(0.02)
    return demo, list(map(int, found))


def is_running(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids: list[int]) -> bool:
    """Whether all processes end in time for a rank that was still importing torch to notice."""
    limit = time.monotonic() + 60
    while any(map(is_running, pids)):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True
