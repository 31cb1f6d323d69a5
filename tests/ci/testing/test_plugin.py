"""What a project gets that has shardckpt and pytest installed, and nothing else of ours."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from tests.testing import wrong_strategies
from tests.tree import ROOT

if TYPE_CHECKING:
    from pathlib import Path


def test_the_plugin_imports_no_torch() -> None:
    """The plugin, which pytest imports in every project that has shardckpt installed, imports no torch."""
    code = "import sys, shardckpt.testing.plugin; assert not {'torch', 'hypothesis', 'fsspec'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failed_contract_is_short_and_ends_with_the_promise() -> None:
    """Pytest prints the frames from the contract's test on, then the promise that was broken, as its own last lines."""
    shown, _, promise = _run(
        f"{wrong_strategies.__file__}::TestSaveDropsLast::test_many_tensors", "--tier=all"
    ).partition("- broken promise -")
    assert "_pytest" not in shown
    assert len(shown.splitlines()) < 60
    assert (
        "\nSaveDropsLast with LoadBlocks does not keep a promise, test_many_tensors\npromised:   A hundred" in promise
    )


def test_an_error_that_says_all_is_no_broken_promise(tmp_path: Path) -> None:
    """Of a contract without strategy or with a misspelt claim, and of any such failure, pytest prints one sentence."""
    module = tmp_path / "test_first.py"
    module.write_text(
        "import pytest\n"
        "from tests.testing.wrong_strategies import Contract, StrategyContract\n"
        "class TestX(StrategyContract): pass\n"
        "class TestZ(Contract): support_urls = True\n"
        "class TestY(Contract):\n"
        "    def test_mine(self): pytest.fail('not on this host', pytrace=False)\n"
    )
    shown = _run(
        f"{module}::TestX::test_many_tensors",
        f"{module}::TestY::test_mine",
        f"{module}::TestZ::test_many_tensors",
        f"--rootdir={tmp_path}",
    )
    assert "\nTestX sets no strategy, or save_strategy and load_strategy\n" in shown
    assert "\nTestZ.support_urls is no claim, and nothing reads it: did you mean supports_urls?" in shown
    assert "\nnot on this host\n" in shown
    assert "promise" not in shown


def _run(*arguments: str) -> str:
    """Run tests that fail, as a project of another does, and return what pytest prints."""
    common = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *common, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout
