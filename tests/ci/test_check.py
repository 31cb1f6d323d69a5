"""The check that a change passes before it lands: .ci/phases.py."""

from __future__ import annotations

import runpy
from typing import TYPE_CHECKING

import pytest

from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

SUITE = """
import pytest
from pathlib import Path

def test_passes(): pass

def test_fails_once():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise ValueError("the first time")

@pytest.mark.skip(reason="not here")
def test_is_skipped(): pass

@pytest.mark.parametrize("number", range({failing}))
def test_fails(number): assert False, "always"
"""


@pytest.mark.parametrize(("failing", "again"), [(0, "flaky"), (1, "flaky"), (5, "failed")])
def test_what_fails_once_is_flaky_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: int, again: str
) -> None:
    """Up to 5 tests that fail run once more, alone; what passes then is called flaky, all else makes the check red."""
    (tmp_path / "test_suite.py").write_text(SUITE.format(failing=failing))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of all that is installed, it needs xdist, for -n 0
    check = runpy.run_path(str(ROOT / ".ci" / "phases.py"))["Check"](tmp_path, 0.0)
    check.run_tests("default", "pytest -p xdist")
    outcomes = {name.partition("::")[2]: result.outcome for name, result in check.results.items()}
    assert outcomes.pop("test_fails_once") == again
    assert outcomes.pop("test_passes") == "passed"
    assert outcomes.pop("test_is_skipped") == "skipped"
    assert set(outcomes.values()) <= ({"failed"} if failing else {"skipped"})
    assert check.is_red == bool(failing)
    capfd.readouterr()
    check.print_summary()
    printed = capfd.readouterr().out.splitlines()
    assert f"{again.upper()}: test_suite.py::test_fails_once - ValueError: the first time" in printed
    assert any(line.startswith("RED: default") for line in printed) == bool(failing)
    failed = failing + (again == "failed")
    assert printed[-1].startswith(f"{1 + (again == 'flaky')} passed, {failed} failed, ")
