"""A manager loads the moments and lets named options of the optimizers keep their live values."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.ranks import RankError

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _make(lr: float, momentum: float, rank: int) -> dict[str, Any]:
    """A stage for each rank; the second's optimizer has no momentum."""
    stage = torch.nn.ModuleDict({str(rank): torch.nn.Linear(3, 3)})
    optimizer: torch.optim.Optimizer
    if rank:
        optimizer = torch.optim.AdamW(stage.parameters(), lr=lr)
    else:
        optimizer = torch.optim.SGD(stage.parameters(), lr=lr, momentum=momentum)
    stage[str(rank)](torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": stage, "optimizer": optimizer}


def _resume(folder: Path, keep: Any) -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    with CheckpointManager(CheckpointConfig(folder=str(folder)), _make(0.5, 0.9, rank)) as manager:
        manager.save(1, force=True)
    states = _make(0.25, 0.1, rank)
    config = CheckpointConfig.model_validate({"folder": folder, "keep_options": keep})
    with CheckpointManager(config, states) as manager:
        manager.load()
    return {name: states["optimizer"].param_groups[0].get(name) for name in ("lr", "momentum")}


def test_named_options_stay_on_each_stage(ranks: Ranks, tmp_path: Path) -> None:
    """A name that the optimizer of one rank has is enough; each rank keeps what it has of it."""
    found = ranks.run(2, _resume, tmp_path, "momentum")
    assert found == [{"lr": 0.5, "momentum": 0.1}, {"lr": 0.5, "momentum": None}]


def test_all_options_stay(tmp_path: Path) -> None:
    """With "all" a resumed job has the options of its program."""
    assert _resume(tmp_path, ("all",)) == {"lr": 0.25, "momentum": 0.1}


def test_a_name_that_no_rank_has_is_one_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    """It lists the options of all ranks' optimizers."""
    with pytest.raises(RankError, match=r"keep_options: 'learning_rate' is no option.*'betas'.*'momentum'"):
        ranks.run(2, _resume, tmp_path, ["lr", "learning_rate"])


def test_a_wrong_name_is_said_before_there_is_a_checkpoint(tmp_path: Path) -> None:
    """The first start of a job says it, not the restart; so where there is no optimizer at all."""
    for states in (_make(0.5, 0.9, 0), {"model": torch.nn.Linear(2, 2)}):
        config = CheckpointConfig(folder=str(tmp_path), keep_options=("lrr",))
        with (
            CheckpointManager(config, states) as manager,
            pytest.raises(CheckpointingException, match="'lrr' is no op"),
        ):
            manager.load()


def test_a_scheduler_that_is_loaded_sets_the_learning_rate_again(tmp_path: Path) -> None:
    """Its next step goes on from its own state, as the documentation says; excluded from loading, it does not."""

    def make(lr: float) -> tuple[dict[str, Any], Any]:
        states = _make(lr, 0.9, 0)
        schedule = torch.optim.lr_scheduler.LambdaLR(states["optimizer"], lambda step: 1.0)
        return {**states, "lr_scheduler": schedule}, schedule

    with CheckpointManager(CheckpointConfig(folder=str(tmp_path)), make(0.5)[0]) as manager:
        manager.save(1, force=True)
    for excluded, later in (((), 0.5), (("lr_scheduler",), 0.25)):
        states, schedule = make(0.25)
        config = CheckpointConfig(folder=str(tmp_path), keep_options=("lr",), exclude_from_loading=excluded)
        with CheckpointManager(config, states) as manager:
            manager.load()
        group = states["optimizer"].param_groups[0]
        assert group["lr"] == 0.25
        states["optimizer"].step()
        schedule.step()
        assert group["lr"] == later
