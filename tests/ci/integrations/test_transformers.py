from __future__ import annotations

from typing import TYPE_CHECKING

from tests.integrations import small
from tests.integrations.accelerated import accelerated
from tests.integrations.transformers import At, Crash, config_of, crash, resume, trainer_of, without_ranks

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tests.ranks import Ranks

__all__ = ["without_ranks"]  # fixtures


def _train(folder: str, crashed: int | None) -> dict[str, torch.Tensor]:
    with accelerated():
        more = [] if crashed is None else [At(crashed, crash)]
        trainer = trainer_of(folder, config_of(folder), *more)
        try:
            return resume(trainer)
        except Crash:
            return {}


def test_under_ddp_all_ranks_resume(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks resume to the weights of two that were not interrupted."""
    whole = ranks.run(2, _train, str(tmp_path / "whole"), None)
    ranks.run(2, _train, str(tmp_path / "parts"), 10)
    resumed = ranks.run(2, _train, str(tmp_path / "parts"), None)
    assert small.is_equal(resumed[0], whole[0])
    assert small.is_equal(resumed[1], whole[1])
