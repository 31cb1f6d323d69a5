"""What a project gets that has shardckpt and pytest installed, and nothing else of ours."""

from __future__ import annotations

import subprocess
import sys

from tests.testing import wrong_strategies
from tests.tree import ROOT


def test_the_plugin_imports_no_torch() -> None:
    """The plugin, which pytest imports in every project that has shardckpt installed, imports no torch."""
    code = "import sys, shardckpt.testing.plugin; assert not {'torch', 'hypothesis', 'fsspec'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_failed_contract_is_short_and_ends_with_the_promise() -> None:
    """Pytest prints the frames from the contract's test on, then the promise that was broken, as its own last lines."""
    shown, _, promise = run_alone(
        f"{wrong_strategies.__file__}::TestSaveDropsLast::test_many_tensors", "--tier=all"
    ).partition("- broken promise -")
    assert "_pytest" not in shown
    assert len(shown.splitlines()) < 60
    assert (
        "\nSaveDropsLast with LoadBlocks does not keep a promise, test_many_tensors\npromised:   A hundred" in promise
    )


def run_alone(*arguments: str) -> str:
    """Run tests that fail, as a project of another does, and return what pytest prints."""
    common = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts=", "--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *common, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout
