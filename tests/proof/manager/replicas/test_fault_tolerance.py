"""Replicas of a job that restarts, and their garbage, in every mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.manager.replicas import jobs as replicas

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

MODES = pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])


@MODES
def test_all_begin_again(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """After a restart of all, each has its own of the step that is loaded: the losses are those of an unbroken run."""
    config = {"async_mode": mode}
    expected = ranks.run(4, replicas.unbroken, str(tmp_path / "a"), 9, config)
    ranks.run(4, replicas.unbroken, str(tmp_path / "b"), 5, config)
    results = ranks.run(4, replicas.restarted, str(tmp_path / "b"), 9, config)
    assert results == [(4, 4, losses[4:]) for losses in expected]
    assert expected[0] != expected[2]


@MODES
def test_garbage_of_both_folders_is_collected(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """The newest stay, and of every step that stays for all, the loaders' places at that step; nothing foreign goes."""
    for name in ("ft-replicat-0", "ft-replicat-1"):
        (tmp_path / name / "notes").mkdir(parents=True)
        (tmp_path / name / "step-3.old").mkdir()
    for steps, first, second in ranks.run(4, replicas.retained, str(tmp_path), mode):
        assert steps == [15, 20, 25]
        assert first == second == [15, 20, 25, 26, 27]
    for name in ("ft-replicat-0", "ft-replicat-1"):
        assert (tmp_path / name / "notes").is_dir()
        assert (tmp_path / name / "step-3.old").is_dir()
