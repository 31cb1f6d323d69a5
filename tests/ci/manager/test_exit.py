from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests import programs
from tests.manager.folders import names_in, steps_of
from tests.manager.training import Training
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

MODES = pytest.mark.parametrize(
    "mode", ["disabled", "async", pytest.param("async_with_pinned_mem", marks=pytest.mark.proof)]
)

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
    done = programs.run(_PROGRAM, str(folder), mode, end, cwd=programs.ROOT, timeout=100)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("mode", "end", "code"),
    [
        ("async", "return", 0),
        *in_proof(("async", "error", 1)),
        ("async_with_pinned_mem", "exit", 3),
        pytest.param("async_with_pinned_mem", "with", 1, marks=pytest.mark.proof),
        *in_proof(("disabled", "return", 0), ("async", "exit", 3), ("async", "with", 1)),
        pytest.param("async_with_pinned_mem", "return", 0, marks=pytest.mark.proof),
        pytest.param("async_with_pinned_mem", "error", 1, marks=pytest.mark.proof),
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


_TOGETHER = """
import datetime, sys, torch.distributed as dist
from tests.manager.training import Training
folder, mode, rank, store, end = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2,
                        timeout=datetime.timedelta(seconds=60))
training = Training(folder, interval=1, async_mode=mode)
training.run(3)
del training
if end == "destroy": dist.destroy_process_group()
"""


def _ended_together(folder: Path, mode: str, end: str) -> list[tuple[int, str]]:
    """Exit codes and errors of two ranks whose program drops its manager while a save is on its way."""
    ranks = [
        programs.start(_TOGETHER, str(folder / "run"), mode, str(rank), str(folder / "store"), end, cwd=programs.ROOT)
        for rank in range(2)
    ]
    errors = [rank.communicate(timeout=100)[1] for rank in ranks]
    return [(rank.returncode, error) for rank, error in zip(ranks, errors, strict=True)]


@pytest.mark.parametrize(
    "mode",
    [pytest.param("async", marks=pytest.mark.ci), pytest.param("async_with_pinned_mem", marks=pytest.mark.proof)],
)
def test_a_dropped_manager_of_several_ranks_has_saved(tmp_path: Path, mode: str) -> None:
    """Without close(), ranks that end together commit the last save in the background, and say nothing."""
    for code, errors in _ended_together(tmp_path, mode, "drop"):
        assert code == 0, errors
        assert "not finalized" not in errors
    assert {step.step for step in steps_of(tmp_path / "run").committed()} == {1, 2, 3}


def test_what_a_dropped_manager_loses_is_on_stderr(tmp_path: Path) -> None:
    """Where the process group was destroyed before, the step's path and what to do are said at the end."""
    for code, errors in _ended_together(tmp_path, "async", "destroy"):
        assert code == 0, errors
        assert f"{tmp_path}/run/step-3 is absent" in errors
        assert "Call close() of its CheckpointManager" in errors
    assert {step.step for step in steps_of(tmp_path / "run").committed()} == {1, 2}


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
