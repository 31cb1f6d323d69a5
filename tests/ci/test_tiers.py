"""Which tests a run of pytest takes: tests/tiers.py."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.tables import table
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

FILES = {
    "pytest.ini": "[pytest]\ntestpaths = tests\nmarkers =\n  ci\n  proof\naddopts = --import-mode=importlib\n",
    "tests/tiers.py": (ROOT / "tests" / "tiers.py").read_text(),
    "tests/conftest.py": """
from tests.tiers import choose_tiers, pytest_addoption, pytest_ignore_collect, select_tiers
def pytest_configure(config): choose_tiers(config)
def pytest_collection_modifyitems(config, items): select_tiers(config, items)
""",
    "tests/test_a.py": """
import pytest
CI, PROOF = pytest.mark.ci, pytest.mark.proof
@pytest.mark.parametrize("row", ["now", pytest.param("ci", marks=CI), pytest.param("proof", marks=PROOF)])
def test_rows(row): pass
""",
    "tests/ci/test_a.py": "def test_ci(): pass\n",
    "tests/proof/test_a.py": "def test_proof(): pass\n",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a test in each tier, and one with a row in each."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def _run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they import torch
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


@table(
    ("arguments", "expected"),
    [
        ((), {"rows[now]"}),
        (("tests/test_a.py",), {"rows[now]"}),
        (("tests/ci",), {"ci"}),
        (("tests/test_a.py", "tests/ci/test_a.py::test_ci"), {"rows[now]", "rows[ci]", "ci"}),
        (("--tier", "ci"), {"rows[ci]", "ci"}),
        (("--tier", "proof"), {"rows[proof]", "proof"}),
        (("--tier", "default,ci"), {"rows[now]", "rows[ci]", "ci"}),
        (("--tier", "all", "tests/test_a.py"), {"rows[now]", "rows[ci]", "rows[proof]"}),
    ],
)
def test_a_run_takes_the_tests_of_its_tiers(project: Path, arguments: tuple[str, ...], expected: set[str]) -> None:
    """The default tier runs unless --tier, or the folders that are named, say otherwise; rows have tiers, too."""
    printed = _run(project, "--collect-only", *arguments).stdout
    assert {line.rpartition("::test_")[2] for line in printed.splitlines() if "::" in line} == expected


def test_an_unknown_tier_is_an_error(project: Path) -> None:
    """A tier that does not exist is refused with those that do."""
    assert "ERROR: --tier: slow: there are default, ci, proof, and all" in _run(project, "--tier", "slow").stderr


def test_a_file_that_hides_its_rows_of_the_ci_tier_is_an_error(project: Path) -> None:
    """A default file whose rows of the CI tier come from elsewhere says so, else a run of that tier would miss them."""
    (project / "tests" / "rows.py").write_text("import pytest\nROWS = [1, pytest.param(2, marks=pytest.mark.ci)]\n")
    test = 'import pytest\nfrom tests.rows import ROWS\n@pytest.mark.parametrize("row", ROWS)\ndef test_b(row): pass\n'
    (project / "tests" / "test_b.py").write_text(test)
    assert "ERROR: rows of the CI tier: their files must say so" in _run(project).stderr
    (project / "tests" / "test_b.py").write_text(f'"""Some rows are in the CI tier."""\n{test}')
    assert "1 passed" in _run(project, "--tier", "ci", "tests/test_b.py").stdout
