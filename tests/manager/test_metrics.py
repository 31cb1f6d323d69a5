from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch.distributed as dist

from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.manager.folders import steps_of
from tests.manager.training import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def _saved(folder: str) -> list[str]:
    """The warnings of a save to which each rank gives its own loss."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shardckpt")
    logger.addHandler(handler)
    try:
        with CheckpointManager(CheckpointConfig(folder=folder, interval=1), {"train_state": Progress()}) as manager:
            manager.save(1, metrics={"loss": 0.5 + dist.get_rank()})
    finally:
        logger.removeHandler(handler)
    return said


def test_each_rank_may_have_its_own_metrics(ranks: RankPool, tmp_path: Path) -> None:
    """The main rank's are stored, and no rank warns of it: a loss is different on every rank."""
    assert ranks.run(2, _saved, str(tmp_path)) == [[], []]
    assert steps_of(tmp_path).inspect_step(1).metrics == {"loss": 0.5}
