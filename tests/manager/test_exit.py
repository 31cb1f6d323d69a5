from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.manager.folders import names_in
from tests.manager.training import Training

ROOT = Path(__file__).parents[2]
MODES = pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])

_PROGRAM = """
import os, signal, sys
from tests.manager.training import Training
folder, mode, end = sys.argv[1:]
training = Training(folder, interval=1, async_mode=mode, keep_latest_k=2)
training.run(3)
if end == "return": pass
if end == "exit": sys.exit(3)
if end == "error": raise KeyError("the training's own")
if end == "signal": os.kill(os.getpid(), signal.SIGTERM)
if end == "with":
    with training.manager:
        training.run(4)
        raise KeyError("the training's own")
"""


def _ended(folder: Path, mode: str, end: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), mode, end],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("mode", "end", "code"),
    [
        ("async", "return", 0),
        ("async", "error", 1),
        ("async_with_pinned_mem", "exit", 3),
        pytest.param("async_with_pinned_mem", "with", 1, marks=pytest.mark.slow),
        pytest.param("disabled", "return", 0, marks=pytest.mark.slow),
        pytest.param("async", "exit", 3, marks=pytest.mark.slow),
        pytest.param("async", "with", 1, marks=pytest.mark.slow),
        pytest.param("async_with_pinned_mem", "return", 0, marks=pytest.mark.slow),
        pytest.param("async_with_pinned_mem", "error", 1, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_ends_has_saved(tmp_path: Path, mode: str, end: str, code: int) -> None:
    """Whether it closes its manager or not, returns, exits or fails: what a process saved alone is whole at its end."""
    found, errors = _ended(tmp_path, mode, end)
    assert found == code, errors
    assert "Exception ignored" not in errors
    training = Training(tmp_path)
    with training.manager as manager:
        assert manager.load()
    assert training.progress.step == (4 if end == "with" else 3)


@MODES
def test_a_program_ended_by_a_signal_leaves_what_is_whole(tmp_path: Path, mode: str) -> None:
    """SIGTERM without save_on_sigterm: each step is whole or absent, and the next run clears away what is neither."""
    code, errors = _ended(tmp_path, mode, "signal")
    assert code == -signal.SIGTERM, errors
    training = Training(tmp_path, interval=1, keep_latest_k=2)
    with training.manager as manager:
        manager.load()
        assert training.progress.step in ((3,) if mode == "disabled" else (1, 2, 3))
        training.run(6)
        manager.wait()
    assert names_in(tmp_path) == {"step-5", "step-6"}
