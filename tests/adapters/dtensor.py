"""What the tests of dtensor share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from tests.adapters.layouts import Meshes, layouts, spread_all, world

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


WORLDS = (1, 2, 3, 4)


def save_all(directory: Path) -> None:
    """Save tensors in all layouts of this world, in one checkpoint."""
    meshes = Meshes()
    state = {layout.name: spread_all(meshes, layout) for layout in layouts(world())}
    dist_checkpointing.save(to_sharded_state_dict(state), directory)


@pytest.fixture(scope="module")
def checkpoints(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, int]]:
    """Checkpoints of 1 to 4 ranks."""
    folder = tmp_path_factory.mktemp("layouts")
    for count in WORLDS:
        ranks.run(count, save_all, folder / str(count))
    return [(folder / str(count), count) for count in WORLDS]
