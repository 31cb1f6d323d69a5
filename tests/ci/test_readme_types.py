"""The examples of the README.md files, as mypy reads them for a user who has not configured it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.readmes import EXAMPLES
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path

#: What is strict in pyproject.toml alone. The rest is shared with lint, and so is its cache: torch is not read again.
#: An example that goes on may put a function in the place of one that it imports here.
_AS_BY_DEFAULT = (
    "# mypy: allow-untyped-defs, allow-untyped-calls, allow-any-generics, no-check-untyped-defs, implicit-reexport, "
    "disable-error-code=no-redef\n"
)


def _module(name: str) -> str:
    return name.replace("-", "_")


def _code(name: str) -> str:
    """An example as a module; one that goes on where another ended imports all names of that."""
    block = EXAMPLES[name]
    before = EXAMPLES.get(block.after)
    return (f"from {_module(before.name)} import *\n" if before else "") + block.code


def test_examples_pass_mypy(tmp_path: Path) -> None:
    """What a README shows is typed as the API is: a user's mypy has no complaint of it."""
    names = [name for name, block in EXAMPLES.items() if block.language == "python"]
    assert len(names) > 20
    modules = {_module(name): _code(name) for name in names}
    modules["shardckpt_json"] = EXAMPLES["json-strategy"].code + EXAMPLES["json-version-2"].code
    for module, code in modules.items():
        (tmp_path / f"{module}.py").write_text(_AS_BY_DEFAULT + code)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *(tmp_path / f"{_module(name)}.py" for name in names)],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
