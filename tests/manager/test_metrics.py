from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.logs import collect_warnings
from tests.manager.folders import steps_of
from tests.manager.training import Progress
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def _saved(folder: str) -> list[str]:
    """The warnings of a save to which each rank gives its own loss."""
    config = CheckpointConfig(folder=folder, interval=1)
    with collect_warnings() as said, CheckpointManager(config, {"train_state": Progress()}) as manager:
        manager.save(1, metrics={"loss": 0.5 + dist.get_rank()})
    return said


def test_each_rank_may_have_its_own_metrics(ranks: Ranks, tmp_path: Path) -> None:
    """The main rank's are stored, and no rank warns of it: a loss is different on every rank."""
    assert ranks.run(2, _saved, str(tmp_path)) == [[], []]
    assert steps_of(tmp_path).inspect_step(1).metrics == {"loss": 0.5}


@table("value", [None, "low", [1.0], torch.ones(2)], ids=["None", "text", "a list", "two"])
def test_a_metric_that_is_no_number(tmp_path: Path, value: Any) -> None:
    """Is named in an error of the family, and nothing is saved."""
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"train_state": Progress()}) as manager:
        with pytest.raises(CheckpointingException, match="the metric 'loss' is"):
            manager.save(1, force=True, metrics={"loss": value})
        assert manager.steps() == []


def test_names_of_metrics_are_texts(tmp_path: Path) -> None:
    """1 and "1" would be one metric, with the value of one of them."""
    with CheckpointManager(CheckpointConfig(folder=tmp_path), {"train_state": Progress()}) as manager:
        with pytest.raises(CheckpointingException, match="the metric 1 is no name"):
            manager.save(1, force=True, metrics={1: 0.5, "1": 0.25})  # type: ignore[dict-item]
        assert manager.steps() == []


def _with_a_wrong_metric(folder: str) -> tuple[str, list[int]]:
    with CheckpointManager(CheckpointConfig(folder=folder), {"train_state": Progress()}) as manager:
        with pytest.raises(CheckpointingException) as caught:
            manager.save(1, force=True, metrics={"loss": None if dist.get_rank() else 1.0})
        assert manager.save(2, force=True)
        return str(caught.value), manager.steps()


def test_a_wrong_metric_on_one_rank(ranks: Ranks, tmp_path: Path) -> None:
    """Is the same error on all ranks, and the next save works."""
    first, second = ranks.run(2, _with_a_wrong_metric, str(tmp_path))
    assert first == second
    assert "rank 1" in first[0]
    assert first[1] == [2]


def test_a_metric_that_is_never_given_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong name would keep no best checkpoint: no step is removed by any policy while none has the metric."""
    config = CheckpointConfig(folder=tmp_path, keep_best_k=1, best_metric="los", keep_latest_k=1)
    with CheckpointManager(config, {"train_state": Progress()}) as manager:
        for step in (1, 2, 3):
            manager.save(step, force=True, metrics={"loss": 1.0})
        manager.wait()
        assert manager.steps() == [1, 2, 3]
        with pytest.raises(CheckpointingException, match=r"metrics=.*: expected a dict"):
            manager.save(4, force=True, metrics=1.0)  # type: ignore[arg-type]
    assert (
        caplog.text.count("by the metric 'los', which is not among those that save was given (did you mean loss?") == 1
    )
    assert caplog.text.count("no step has a value of the metric 'los'") >= 1
