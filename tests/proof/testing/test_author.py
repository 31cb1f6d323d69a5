"""The way of a new author: from an empty directory, with the wheel and the README of the plugins alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.readmes import EXAMPLES
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

STRATEGY, VERSION_2 = EXAMPLES["json-strategy"].code, EXAMPLES["json-version-2"].code
PYPROJECT = EXAMPLES["json-pyproject"].code + '\n[tool.hatch.build]\nonly-include = ["shardckpt_json.py"]\n'


def _run(folder: Path, installed: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return done.stdout


def _install(source: Path, folder: Path, installed: Path) -> None:
    """Build a wheel without a network, and install it."""
    _run(folder, installed, "build", "--wheel", "--no-isolation", "--outdir", str(folder / "wheels"), str(source))
    wheel = max((folder / "wheels").glob("*.whl"), key=lambda path: path.stat().st_mtime_ns)
    options = ["--no-deps", "--no-index", "--quiet", "--upgrade", "--target", str(installed)]
    _run(folder, installed, "pip", "install", *options, str(wheel))


@pytest.mark.parametrize(
    ("module", "contract"),
    [
        pytest.param(STRATEGY, "json-contract", marks=pytest.mark.proof),
        (STRATEGY + VERSION_2, "json-contract-2"),  # has the first, too
    ],
)
def test_the_readmes_strategy_passes_the_contract(tmp_path: Path, module: str, contract: str) -> None:
    """Built and installed as the README shows, from wheels alone, either version passes the contract and is listed."""
    project, installed = tmp_path / "project", tmp_path / "installed"
    project.mkdir()
    _install(ROOT, tmp_path, installed)
    (project / "shardckpt_json.py").write_text(module)
    (project / "pyproject.toml").write_text(PYPROJECT)
    _install(project, tmp_path, installed)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "test_json.py").write_text(EXAMPLES[contract].code)
    (empty / "pytest.ini").write_text("[pytest]\n")
    where = "import shardckpt.testing, shardckpt_json; print(shardckpt.testing.__file__, shardckpt_json.__file__)"
    (empty / "where.py").write_text(where)
    assert _run(empty, installed, "where").count(str(installed)) == 2
    printed = _run(empty, installed, "pytest", "-q", "-p", "no:cacheprovider", "-rs")
    found = re.search(r"^(\d+) passed, (\d+) skipped", printed, re.MULTILINE)
    assert found is not None, printed
    assert int(found[1]) >= 100
    listed = _run(empty, installed, "shardckpt", "strategies")
    assert re.search(r"^json +1 +load .*shardckpt-json 1.0", listed, re.MULTILINE), listed
