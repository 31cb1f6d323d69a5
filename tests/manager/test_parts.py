from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.manager.part import ManagerPart
from tests.manager.training import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class _Recorder(ManagerPart):
    """Notes what the manager calls, and answers as it is told."""

    def __init__(self, *, joins: bool = True, preempted: bool = False, fails: bool = False) -> None:
        self.calls: list[str] = []
        self._joins, self._preempted, self._fails = joins, preempted, fails

    def on_step(self, step: int) -> None:
        self.calls.append(f"step {step}")

    def is_preempted(self) -> bool:
        return self._preempted

    def joins_step(self, step: int, *, due: bool) -> bool:
        self.calls.append(f"join {step} {due}")
        return self._joins

    def before_save(self, step: int, metrics: Mapping[str, float | None]) -> None:
        self.calls.append(f"before {step} {dict(metrics)}")

    def after_save(self, step: int, *, last_step: bool) -> None:
        self.calls.append(f"after {step} {last_step}")

    def after_commit(self, step: int) -> None:
        self.calls.append(f"commit {step}")

    def after_load(self, step: int | None) -> None:
        self.calls.append(f"load {step}")

    def close(self, error: BaseException | None = None) -> None:
        self.calls.append(f"close {error!r}")
        if self._fails:
            raise OSError("of the part's own")


def _manager(folder: Path, *parts: ManagerPart) -> CheckpointManager:
    manager = CheckpointManager(CheckpointConfig(folder=folder, interval=2), {"train_state": Progress()})
    manager._parts += parts
    return manager


def test_a_part_is_called_at_every_step(tmp_path: Path) -> None:
    """A part hears of every step, and of those that are saved before, when they are durable, and after."""
    part = _Recorder()
    with _manager(tmp_path, part) as manager:
        assert [manager.save(step, metrics={"loss": 0.5}) for step in (1, 2)] == [False, True]
        assert manager.load()
    saved = ["step 2", "join 2 True", "before 2 {'loss': 0.5}", "commit 2", "after 2 False"]
    assert part.calls == ["step 1", "join 1 False", *saved, "load 2", "close None"]


def test_all_parts_are_asked(tmp_path: Path) -> None:
    """A part that leaves a step to another replica keeps no later part from taking part in it."""
    parts = (_Recorder(joins=False), _Recorder())
    with _manager(tmp_path, *parts) as manager:
        assert not manager.save(2)
        assert manager.steps() == []
    assert parts[0].calls == parts[1].calls == ["step 2", "join 2 True", "close None"]


def test_a_preempted_step_is_saved_once(tmp_path: Path) -> None:
    """What a part says of preemption saves the step, whatever the interval; those after it are saved as ever."""
    with _manager(tmp_path, _Recorder(preempted=True)) as manager:
        assert [manager.save(step) for step in (5, 7, 8)] == [True, False, True]
        assert manager.preempted


def test_every_part_is_closed(tmp_path: Path) -> None:
    """A part that fails when it is closed keeps no other from closing, and its error is raised."""
    parts = (_Recorder(fails=True), _Recorder())
    manager = _manager(tmp_path, *parts)
    with pytest.raises(OSError, match="of the part's own"):
        manager.close()
    assert parts[0].calls == parts[1].calls == ["close None"]


def test_a_part_learns_of_the_error_that_ends_a_training(tmp_path: Path) -> None:
    """Where the loop ends by an error, each part is given it, to wait for no other rank."""
    part = _Recorder()
    with pytest.raises(KeyError, match="of the training"), _manager(tmp_path, part):
        raise KeyError("of the training")
    assert part.calls == ["close KeyError('of the training')"]
