"""What a save costs the training, counted."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.manager.writer import StepWriter

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_collector_waits_for_background_saves_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Python's garbage collector is paused until a background save has copied, and not while a save is written."""
    enabled: list[bool] = []
    write = StepWriter.write

    def note(*args: Any, **options: Any) -> None:
        enabled.append(gc.isenabled())
        write(*args, **options)

    monkeypatch.setattr(StepWriter, "write", note)
    for mode in ("disabled", "async"):
        config = CheckpointConfig(folder=tmp_path / mode, interval=1, async_mode=mode)
        with CheckpointManager(config, {"model": torch.nn.Linear(1, 1)}) as manager:
            manager.save(1)
            manager.save(2, last_step=True)
    assert enabled == [True, True, False, True]
    assert gc.isenabled()
