"""DTensors as shards: what N ranks save, M ranks load, whatever the placements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing
from tests.adapters.dtensor import checkpoints
from tests.adapters.layouts import SHAPES, layouts, named, values

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["checkpoints"]  # fixtures


def test_what_is_stored_are_the_global_tensors(checkpoints: list[tuple[Path, int]]) -> None:
    """Whatever mesh and placements saved it, each tensor, read whole by one process, is the one that was laid out."""
    for directory, count in checkpoints:
        found = dist_checkpointing.load_plain_tensors(directory)
        keys = {f"{layout.name}.{named(shape)}": shape for layout in layouts(count) for shape in [*SHAPES, ()]}
        assert set(found) == set(keys)
        for key, shape in keys.items():
            assert torch.equal(found[key], values(shape)), key
