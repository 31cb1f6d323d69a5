"""Gradients are not stored, and a save says so once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt.manager import CheckpointConfig, CheckpointManager

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_gradients_at_a_save_are_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """The first save between backward() and the step says that they are not stored; no other save says anything."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig.model_validate({"folder": tmp_path, "async_mode": mode, "keep_latest_k": 0})
    said = []
    caplog.set_level(logging.INFO, "shardckpt.manager")
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        for step, has_gradients in enumerate([False, True, True, False]):
            optimizer.zero_grad()
            if has_gradients:
                model(torch.ones(2)).sum().backward()
            manager.save(step, force=True)
            said.append(sum("have gradients at a save" in each.getMessage() for each in caplog.records))
    assert said == [0, 1, 1, 1]


def test_a_model_alone_has_no_step_to_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where no optimizer is saved, nothing is said."""
    model = torch.nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    with (
        caplog.at_level(logging.INFO),
        CheckpointManager(CheckpointConfig(folder=str(tmp_path)), {"model": model}) as m,
    ):
        m.save(1, force=True)
    assert not [each for each in caplog.records if "gradients" in each.getMessage()]
