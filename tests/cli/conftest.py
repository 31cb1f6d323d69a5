"""Fixtures of the command's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, tmp_path / "c")
    return tmp_path / "c"
