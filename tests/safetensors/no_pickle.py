"""What the tests of no pickle share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import dist_checkpointing
from tests.safetensors import unpickling

if TYPE_CHECKING:
    from pathlib import Path


def save_by_name(folder: Path) -> Path:
    """Save the state with classes by name."""
    dist_checkpointing.save(unpickling.make_state(), folder / "checkpoint", "safetensors")
    return folder / "checkpoint"
