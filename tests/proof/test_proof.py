"""The proof tier, run to its end: python -m tests.proof."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.proof_samples import README
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST = """
def pytest_configure(config): choose_tiers(config)
def pytest_collection_modifyitems(config, items): select_tiers(config, items)
"""

FIRST = """
import os
def test_runs_once(): os.mkdir("runs")
def test_fails(): assert False, "always"
"""

SECOND = """
import os
def test_waits():
    if not os.path.exists("seen"):
        os.mkdir("seen")
        open("pipe").read()
def test_dies(): os._exit(0)
"""


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """After Ctrl-C in the second file the first is run again with --again only; a file whose process dies failed."""
    (tmp_path / "tests" / "proof").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p xdist --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "tiers.py").read_text() + CONFTEST)
    (tmp_path / "tests" / "README.md").write_text(README)
    (tmp_path / "tests" / "proof" / "test_a.py").write_text(FIRST)
    (tmp_path / "tests" / "proof" / "test_b.py").write_text(SECOND)
    os.mkfifo(tmp_path / "pipe")
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "tests.proof", "--report", str(report), "--root", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # eight runs of pytest need xdist alone, for -n 0

    program = subprocess.Popen(command, cwd=ROOT, env=environment)
    pipe = os.open(tmp_path / "pipe", os.O_WRONLY)  # as soon as the second file reads
    program.send_signal(signal.SIGINT)
    assert program.wait() == 128 + signal.SIGINT
    with pytest.raises(BrokenPipeError):
        os.write(pipe, b"nobody reads any more")
    os.close(pipe)
    assert "- `tests/proof/test_b.py`" in report.read_text()

    assert subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 1
    failed = "- `tests/proof/test_a.py::test_fails`: AssertionError: always"
    assert "| `tests/proof/test_a.py` | 1 | 1 | 0 | 0 |" in report.read_text()
    assert failed in report.read_text()
    assert "- `tests/proof/test_b.py::(the file)`: its process ended with status 0; last line: " in report.read_text()

    assert subprocess.run([*command, "--again", "--only", "test_a"], cwd=ROOT, env=environment, check=False).returncode
    assert "| `tests/proof/test_a.py` | 0 | 2 | 0 | 0 |" in report.read_text()
