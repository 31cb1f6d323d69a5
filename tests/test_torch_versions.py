from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from shardckpt.tensors.torch_private import OLDEST_TORCH
from tests.torch_versions import README, ROOT, SELECTION, Row, count_tests, read_table, write_table

if TYPE_CHECKING:
    from pathlib import Path

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="good"/>
<testcase classname="a" name="bad"><failure/></testcase>
<testcase classname="a" name="broken"><error/></testcase>
<testcase classname="a" name="left_out"><skipped/></testcase>
<testcase classname="" name="tests.not_collected"><error/></testcase>
</testsuite></testsuites>"""


def test_no_row_is_below_the_floor() -> None:
    """The table has no release of torch that is refused at import, and no Python that pip refuses."""
    for row in read_table(README.read_text()):
        assert _minor(row.torch) >= OLDEST_TORCH
        assert _minor(row.python) >= (3, 10)


def test_each_python_that_is_claimed_was_run_with_the_oldest_torch() -> None:
    """The classifiers of pyproject.toml are the Pythons of the rows with the floor, and the newest torch has a row."""
    project = (ROOT / "pyproject.toml").read_text()
    claimed = {_minor(found) for found in re.findall(r"Programming Language :: Python :: (3\.\d+)", project)}
    rows = read_table(README.read_text())
    assert claimed == {_minor(row.python) for row in rows if _minor(row.torch) == OLDEST_TORCH}
    assert max(_minor(row.torch) for row in rows) > OLDEST_TORCH


def test_what_has_a_row_works() -> None:
    """No row of the table has a failed demo or a failed test."""
    assert [str(row) for row in read_table(README.read_text()) if row.demo != "passed" or row.failed] == []


def test_the_selection_exists() -> None:
    """Each file and folder that the command runs is there."""
    assert [name for name in SELECTION if not (ROOT / name).exists()] == []


def test_a_row_takes_the_place_of_the_one_for_the_same_releases() -> None:
    """Rows stay in the order of the releases, and what stands around the table stays as it is."""
    first, second = Row("2.11.0", "3.11.7", "passed", 3, 0, 1), Row("2.100.0", "3.9.1", "failed", 0, 1, 2)
    text = write_table(write_table(README.read_text(), second), first)
    rows = read_table(text)
    assert rows.index(first) < rows.index(second)
    for row in rows:
        assert write_table(text, row) == text
    other = first._replace(failed=7)
    assert write_table(text, other) == text.replace(str(first), str(other))


def test_results_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures and errors count as failed, and are named; a run without results is no row."""
    (tmp_path / "results.xml").write_text(REPORT)
    assert count_tests(tmp_path / "results.xml") == (1, 3, 1)
    assert capsys.readouterr().err == "failed: a::bad\nfailed: a::broken\nfailed: tests.not_collected\n"
    with pytest.raises(SystemExit, match="no results"):
        count_tests(tmp_path / "none.xml")


def _minor(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")[:2]))
