"""DTensors as shards: what N ranks save, M ranks load, whatever the placements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from tests.adapters.dtensor import checkpoints
from tests.adapters.layouts import Meshes, layouts, spread_all, world

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

__all__ = ["checkpoints"]  # fixtures


def _load_all(checkpoints: list[tuple[Path, int]]) -> None:
    """Load every tensor that any world has saved in any layout, in all layouts of this world."""
    meshes = Meshes()
    for layout in layouts(world()):
        expected = spread_all(meshes, layout)
        for directory, saved_by in checkpoints:
            state = {saved.name: spread_all(meshes, layout, factor=0.0) for saved in layouts(saved_by)}
            loaded = dist_checkpointing.load(to_sharded_state_dict(state), directory, strict=True)
            for saved, tensors in state.items():
                for name, tensor in tensors.items():
                    assert loaded[saved][name] is tensor
                    assert torch.equal(tensor.to_local(), expected[name].to_local()), (saved, layout.name, name)


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.proof) for count in (1, 3, 4))])
def test_any_layout_loads_as_any_other(ranks: Ranks, checkpoints: list[tuple[Path, int]], count: int) -> None:
    """What 1 to 4 ranks saved in any layout fills the caller's DTensors of any other, and load returns these."""
    ranks.run(count, _load_all, checkpoints)
