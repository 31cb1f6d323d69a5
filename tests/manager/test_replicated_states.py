"""A list of schedulers as one state."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from shardckpt.errors import CheckpointingException
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from torch.optim.lr_scheduler import StepLR


def _schedulers(count: int) -> list[StepLR]:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0) for _ in range(count)]
    return [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]


def test_a_list_of_schedulers_is_saved_and_resumed(tmp_path: Path) -> None:
    """Schedulers with equal states are stored as one state, which another number of them loads."""
    saved, loaded = _schedulers(2), _schedulers(3)
    for each in saved:
        each.optimizer.step()
        each.step()
    config = CheckpointConfig(folder=str(tmp_path), interval=1)
    with CheckpointManager(config, {"lr_scheduler": saved}) as manager:
        assert manager.save(1)
    with CheckpointManager(config, {"lr_scheduler": loaded}) as manager:
        assert manager.load()
    assert [each.state_dict() for each in loaded] == [saved[0].state_dict()] * 3


@table("value", [float("nan"), np.arange(3.0), torch.tensor([1.0, float("nan")]), (np.arange(2), [float("nan")])])
def test_states_are_compared_as_values(tmp_path: Path, value: Any) -> None:
    """Schedulers that hold arrays, tensors or NaN are equal where their values are."""
    schedulers = _schedulers(2)
    for each in schedulers:
        each.best = copy.deepcopy(value)  # type: ignore[attr-defined]
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path), interval=1), {"lr_scheduler": schedulers}) as manager:
        assert manager.save(1)
        assert manager.load()


def test_states_that_differ_are_not_stored_as_one(tmp_path: Path) -> None:
    """Where the states in a list are not equal, the save is an error that says what to do."""
    schedulers = _schedulers(2)
    schedulers[1].last_epoch = 5
    config = CheckpointConfig(folder=str(tmp_path), interval=1)
    with (
        CheckpointManager(config, {"lr_scheduler": schedulers}) as manager,
        pytest.raises(CheckpointingException, match="'lr_scheduler' is a list of 2 whose states are not equal"),
    ):
        manager.save(1)
