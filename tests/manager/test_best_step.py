"""The best step by a metric, the newest, and the metrics of any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager, KeepBest, KeepLatest, list_checkpoints
from tests.manager.training import Progress
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manager import RetentionPolicy
    from tests.ranks import Ranks


def _saved(folder: Path, losses: dict[int, float], **settings: Any) -> CheckpointManager:
    model = nn.Linear(2, 1)
    config = CheckpointConfig(folder=str(folder), interval=1, keep_latest_k=0, **settings)
    manager = CheckpointManager(config, {"model": model})
    for step, loss in losses.items():
        nn.init.constant_(model.weight, float(step))
        manager.save(step, metrics={"loss": loss, "score": -loss})
    return manager


def test_the_best_step_by_a_metric_is_found_and_loaded(tmp_path: Path) -> None:
    """By the metric of the call or of the configuration; of equal values the newer, never one that is not finite."""
    with _saved(tmp_path, {1: 0.5, 2: 0.25, 3: 0.25, 4: float("nan"), 5: 0.75}, best_metric="score") as manager:
        assert manager.best_step("loss") == 3
        assert manager.best_step("loss", "max") == 5
        assert manager.best_step() == 5
        assert manager.best_step(mode="max") == 3
        assert manager.latest_step() == 5
        assert manager.latest_step({np.int64(5), 4}) == 3
        for wrong in ("54", None, [None]):
            with pytest.raises(CheckpointingException, match=r"^without: .* is no step; give a list of steps"):
                manager.latest_step(wrong)  # type: ignore[arg-type]
        with pytest.deprecated_call(match="is latest_step now"):
            assert manager.find_newest([5]) == 4
        assert manager.metrics(4) == {"loss": None, "score": None}
        assert manager.metrics(2) == {"loss": 0.25, "score": -0.25}
        assert manager.load("best")
        assert manager.loaded_step == 5
        assert manager.load("latest")
        assert manager.loaded_step == 5
    summaries = {each.step: each.metrics for each in list_checkpoints(tmp_path)}
    assert summaries[2] == {"loss": 0.25, "score": -0.25}


@table("policy, best", [(KeepBest("score", mode="max"), 2), (KeepBest("score"), 3), (KeepLatest(3), 3)])
def test_the_metric_of_the_best_step_may_be_named_beside_policies(
    tmp_path: Path, policy: RetentionPolicy, best: int
) -> None:
    """The mode is that of the policy which keeps the best by it; without such a policy best_metric counts alone."""
    model = nn.Linear(2, 1)
    config = CheckpointConfig(folder=tmp_path, interval=1, retention=[policy], best_metric="score")
    with CheckpointManager(config, {"model": model}) as manager:
        for step, score in ((1, 0.5), (2, 0.75), (3, 0.25)):
            manager.save(step, metrics={"score": score})
            manager.wait()
        assert manager.best_step() == best


def test_a_metric_that_no_step_has_lists_those_there_are(tmp_path: Path) -> None:
    """A typo is an error, and so is a call that names no metric; an empty folder has no best step."""
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "none")), {"model": nn.Linear(2, 1)}) as manager:
        assert manager.best_step("loss") is None
        assert not manager.load("best")
    with _saved(tmp_path / "c", {1: 0.5}) as manager:
        with pytest.raises(CheckpointingException, match=r"'los' \(did you mean loss\? metrics: loss, score\)"):
            manager.best_step("los")
        with pytest.raises(CheckpointingException, match="by which metric"):
            manager.load("best")
        with pytest.raises(CheckpointingException, match="'bset' is no step; give its number, 'latest', 'best'"):
            manager.load("bset")  # type: ignore[arg-type]


def _load_otherwise(folder: Path, steps: list[Any]) -> str:
    manager = CheckpointManager(CheckpointConfig(folder=str(folder)), {"train_state": Progress()})
    with manager, pytest.raises(CheckpointingException, match="disagree on step") as caught:
        manager.load(steps[dist.get_rank()])
    return str(caught.value)


@pytest.mark.parametrize("steps", [["best", "latest"], [-1, "no"], [1, "best"]], ids=str)
def test_ranks_that_load_other_steps_are_told(tmp_path: Path, ranks: Ranks, steps: list[Any]) -> None:
    """No rank looks for the best step alone, or leaves alone with what is wrong."""
    first, second = ranks.run(2, _load_otherwise, tmp_path / "c", steps)
    assert f"{steps[0]!r} on rank 0, {steps[1]!r} on rank 1" in first
    assert first == second
