from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.manager import jobs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


@pytest.mark.parametrize(
    ("mode", "world_size"),
    [
        ("disabled", 1),
        ("disabled", 4),
        ("async", 2),
        pytest.param("async_with_pinned_mem", 2, marks=pytest.mark.proof),
        pytest.param("disabled", 2, marks=pytest.mark.proof),
        pytest.param("async", 1, marks=pytest.mark.proof),
        pytest.param("async", 4, marks=pytest.mark.proof),
        pytest.param("async_with_pinned_mem", 1, marks=pytest.mark.proof),
        pytest.param("async_with_pinned_mem", 4, marks=pytest.mark.proof),
    ],
)
def test_a_resumed_run_is_the_run_without_an_interruption(
    gloo_ranks: RankPool, tmp_path: Path, mode: str, world_size: int
) -> None:
    """Model, optimizer, schedule, loaders, counters and dropout go on from the newest step: the losses are equal."""
    config = {"async_mode": mode}
    expected = gloo_ranks.run(world_size, jobs.unbroken, str(tmp_path / "a"), 9, {"enable_checkpoint": False})
    gloo_ranks.run(world_size, jobs.unbroken, str(tmp_path / "b"), 5, config)
    results = gloo_ranks.run(world_size, jobs.resumed, str(tmp_path / "b"), 9, config)
    assert results == [(4, losses[4:]) for losses in expected]


@pytest.mark.parametrize("at_close", [False, True], ids=["next call", "close"])
def test_an_error_in_the_background_is_raised(gloo_ranks: RankPool, tmp_path: Path, at_close: bool) -> None:
    """What goes wrong behind the training is raised on all ranks by the next call, or by close; nothing is left."""
    (message, left), (other, _) = gloo_ranks.run(2, jobs.failing_save, str(tmp_path), at_close)
    assert message == other
    assert "EFBIG" in message
    assert "step-2" in message
    assert left == {"step-1"}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_sigterm_saves_at_the_next_step(gloo_ranks: RankPool, tmp_path: Path, mode: str) -> None:
    """One rank's signal is everyone's: all save the same step, and the loop can see that it should end."""
    assert gloo_ranks.run(2, jobs.preempted, str(tmp_path), mode) == [(True, 4)] * 2
