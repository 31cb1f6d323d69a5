"""The proof tier, run to its end: python -m tests.proof."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.junit import Result
from tests.proof.__main__ import name_result, read_all, read_promises, write_report
from tests.proof_samples import README
from tests.readmes import READMES
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.a.test_kill" name="test_kill[1]" time="1.5"/>
<testcase classname="tests.a.test_kill.TestAll" name="test_kill" time="2"><failure message="lost&#10;more"/></testcase>
<testcase classname="tests.a.test_kill" name="test_disk" time="0"><skipped message="no disk"/></testcase>
</testsuite></testsuites>"""


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
