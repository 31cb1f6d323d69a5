from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.compat.rewritten import run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.ci), pytest.param(1, marks=pytest.mark.proof)])
def test_a_job_for_megatron_runs_here(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Ported by the one import rule, a training script saves, overwrites, saves in the background, resumes, prunes."""
    ranks.run(world, run, "train", str(tmp_path))
    for other in {1, 2, 4} - {world}:
        ranks.run(other, run, "resume", str(tmp_path), "first", "4")
        ranks.run(other, run, "resume", str(tmp_path), "second", "3")
    ranks.run(world, run, "prune", str(tmp_path), "first", "4")
