"""When to save: a list of small policies, as what to keep is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from shardckpt.errors import CheckpointingException, ConfigurationError
from shardckpt.manager import (
    CheckpointConfig,
    CheckpointManager,
    Moment,
    SaveAfter,
    SaveAt,
    SaveEvery,
    save_policies,
)
from tests.manager.training import Progress

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from tests.ranks import Ranks


class _Clock:
    """A clock that moves by a minute a step."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def _run(folder: Path, steps: Iterable[int], clock: _Clock | None = None, **settings: Any) -> list[int]:
    """Return the steps of a training that were saved."""
    config = CheckpointConfig(folder=str(folder), keep_latest_k=0, **settings)
    with CheckpointManager(config, {"train_state": Progress()}) as manager:
        for step in steps:
            if clock is not None:
                clock.now += 60
            manager.save(step, metrics={"loss": 1.0 / step})
        return manager.steps()


def test_any_policy_makes_a_step_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples, certain steps, the clock since the last save whatever made it, and a function of the metrics."""
    clock = _Clock()
    monkeypatch.setattr(save_policies, "time", clock)
    assert _run(tmp_path / "a", range(1, 11), save_when=[SaveEvery(4), SaveAt([1, 10])]) == [1, 4, 8, 10]
    assert _run(tmp_path / "b", range(1, 11), clock, save_when=[SaveAfter(180), SaveAt([4])]) == [3, 4, 7, 10]
    small = [lambda moment: moment.metrics["loss"] < 0.15]
    assert _run(tmp_path / "c", range(1, 9), save_when=small) == [7, 8]
    assert _run(tmp_path / "d", range(1, 5), save_when=SaveAt([3]), enable_first_step_checkpoint=True) == [1, 3]
    assert SaveEvery(3)(Moment(0, 0.0, {})) is False


def _own_answer(folder: Path) -> list[int]:
    return _run(folder, range(1, 5), save_when=[lambda moment: dist.get_rank() == 0 and moment.step == 3])


def test_the_main_rank_decides(tmp_path: Path, ranks: Ranks) -> None:
    """A function that would answer otherwise on another rank hangs nobody."""
    assert ranks.run(2, _own_answer, tmp_path / "c") == [[3], [3]]


class _SmallLoss(SaveEvery):
    """Also looks at a metric."""

    def __call__(self, moment: Moment) -> bool:
        return bool(moment.metrics) and super().__call__(moment)


def _train_with_own_policy(folder: Path) -> list[bool]:
    config = CheckpointConfig(folder=str(folder), save_when=[_SmallLoss(2)])
    with CheckpointManager(config, {"train_state": Progress()}) as manager:
        return [manager.save(step, metrics={"loss": 1.0} if dist.get_rank() == 0 else {}) for step in (1, 2, 3)]


def test_the_main_rank_asks_a_subclass_of_a_policy(tmp_path: Path, ranks: Ranks) -> None:
    """One that looks at more than the step may differ from rank to rank, so that some would save alone."""
    assert ranks.run(2, _train_with_own_policy, tmp_path) == [[False, True, False]] * 2


def test_what_is_no_policy_is_refused(tmp_path: Path) -> None:
    """At the configuration, or when it answers; a built-in one is stored as JSON and read back."""
    with pytest.raises(
        ConfigurationError, match="CheckpointConfig: save_when: 500 is not a save policy: give SaveEvery"
    ):
        CheckpointConfig(save_when=[500])
    with pytest.raises(ConfigurationError, match="save_when takes the place of interval"):
        CheckpointConfig(save_when=[SaveEvery(3)], interval=4)
    with pytest.raises(CheckpointingException, match="returned None: return True or False"):
        _run(tmp_path / "c", [1], save_when=[lambda _: None])
    config = CheckpointConfig(save_when=[SaveEvery(3), SaveAt([2, 1]), SaveAfter(60)])
    assert CheckpointConfig(save_when=config.model_dump()["save_when"]) == config
