"""The proof tier, run to its end: python -m tests.proof."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.junit import Result
from tests.proof.__main__ import name_result, read_all, read_promises, write_report
from tests.readmes import READMES
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

README = """
## What is promised

| promise | shown by |
|---|---|
| **Saves** | |
| nothing is lost | `tests/a/`, `tests/test_b.py` (proof) |
| all is fast | `tests/test_fast.py` |
"""
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a.test_kill" name="test_kill[1]" time="1.5"/>
<testcase classname="tests.a.test_kill.TestAll" name="test_kill" time="2"><failure message="lost&#10;more"/></testcase>
<testcase classname="tests.a.test_kill" name="test_disk" time="0"><skipped message="no disk"/></testcase>
</testsuite></testsuites>"""
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


def test_the_report_has_the_results_by_promise(tmp_path: Path) -> None:
    """Each row has the proof tests of the files that it names; what no row names and what failed stands below."""
    for name in ("a/test_kill.py", "test_other.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).touch()
    collected = {"tests/a/test_kill.py": ["3 tests"], "tests/test_other.py": ["tests/test_other.py::test_it"]}
    name_result(tmp_path, *next(iter(collected.items()))).write_text(JUNIT)
    results = read_all(collected, tmp_path, tmp_path)
    assert results["tests/a/test_kill.py::TestAll::test_kill"] == Result("failed", 2.0, "lost")
    report = write_report("today", results, README).splitlines()
    assert "today, 4 s of tests." in report
    assert [line for line in report if line.startswith(("| ", "- "))] == [
        "| promise | passed | failed | skipped | not run | seconds |",
        "| **Saves** |  |  |  |  |  |",
        "| nothing is lost | 1 | 1 | 1 | 0 | 4 |",
        "| all is fast | default or CI |  |  |  |  |",
        "| file | passed | failed | skipped | not run | seconds |",
        "| `tests/test_other.py` | 0 | 0 | 0 | 1 | 0 |",
        "- `tests/a/test_kill.py::TestAll::test_kill`: lost",
        "- 1: no disk",
        "- `tests/test_other.py`",
    ]


def test_every_row_of_the_promises_is_in_the_report() -> None:
    """All rows of tests/README.md are read, and what they name is there."""
    rows = read_promises(READMES["tests/README.md"])
    assert len(rows) == READMES["tests/README.md"].partition("## What is promised\n")[2].count("\n| ") - 1
    assert [name for _, names in rows for name in names if not (ROOT / name).exists()] == []
    (other,) = (row for row, names in rows if not names and not row.startswith("**"))
    assert other.startswith("what follows on crashes")  # it is about the rows below it


@pytest.mark.ci
def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    """After Ctrl-C in the second file the first is run again with --again only; a file whose process dies failed."""
    (tmp_path / "tests" / "proof").mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:shardckpt --import-mode=importlib\n")
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "tiers.py").read_text() + CONFTEST)
    (tmp_path / "tests" / "README.md").write_text(README)
    (tmp_path / "tests" / "proof" / "test_a.py").write_text(FIRST)
    (tmp_path / "tests" / "proof" / "test_b.py").write_text(SECOND)
    os.mkfifo(tmp_path / "pipe")
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "tests.proof", "--report", str(report), "--root", str(tmp_path)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}

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
