from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from tests.integrations import small

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks
pytest.importorskip("lightning")
from tests.integrations.lightning import fit

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec.*is deprecated:FutureWarning",  # Lightning, of torch's
    "ignore:.*does not have many workers",
    "ignore:.*is smaller than the logging interval",
    "ignore:.*exists and is not empty",
)


def _fit_ddp(folder: str, steps: int, ckpt_path: str | None) -> Any:
    os.environ.update(small.torchrun())
    from lightning.pytorch.strategies import DDPStrategy

    options = {"devices": dist.get_world_size(), "strategy": DDPStrategy(process_group_backend="gloo")}
    return fit("lightning.pytorch", folder, steps, ckpt_path, **options)


def test_under_ddp_rank_0_saves_and_all_resume(ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks train on, from what rank 0 alone saved, to the weights of the uninterrupted training."""
    whole = ranks.run(2, _fit_ddp, str(tmp_path / "whole"), 3 * 2, None)
    ranks.run(2, _fit_ddp, str(tmp_path / "parts"), 3, None)
    resumed = ranks.run(2, _fit_ddp, str(tmp_path / "parts"), 6, str(tmp_path / "parts" / "step=3.ckpt"))
    assert all(small.is_equal(each, whole[0]) for each in resumed)
