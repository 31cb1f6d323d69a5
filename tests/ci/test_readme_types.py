"""The examples of the README.md files, as mypy reads them for a user who has not configured it."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.readmes import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _module(name: str) -> str:
    return name.replace("-", "_")


def _code(name: str) -> str:
    """An example as a module; one that goes on where another ended imports all names of that."""
    block = EXAMPLES[name]
    before = EXAMPLES.get(block.after)
    return (f"from {_module(before.name)} import *\n" if before else "") + block.code


def test_examples_pass_mypy(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """What a README shows is typed as the API is: a user's mypy has no complaint of it."""
    names = [name for name, block in EXAMPLES.items() if block.language == "python"]
    for name in names:
        (tmp_path / f"{_module(name)}.py").write_text(_code(name))
    assert len(names) > 20
    (tmp_path / "shardckpt_json.py").write_text(EXAMPLES["json-strategy"].code + EXAMPLES["json-version-2"].code)
    cache = pytestconfig.rootpath / ".mypy_cache" / "examples"
    # no-redef: an example that goes on may put a function in the place of one that it imports here.
    options = ["--config-file=", "--python-version=3.10", "--disable-error-code=no-redef", f"--cache-dir={cache}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *(f"{_module(name)}.py" for name in names)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
