from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.testing.cases import save_load_cases
from shardckpt.testing.states import Destinations, make_state_dict
from shardckpt_torch_dist import (
    ShardedLoadPlanner,
    ShardedSavePlanner,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from tests.property.search import drawn, for_all

if TYPE_CHECKING:
    from shardckpt.testing.cases import SaveLoadCase

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def _data_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.suffix == ".distcp"}


@drawn(6)
def test_the_strategy_plans_any_layout_by_planners(tmp_path: Path, count: int) -> None:
    """Flattened shards, prepended axes, replicas, empty boxes: with planner= the same bytes, and the same values."""

    def check(batch: SaveLoadCase) -> None:
        path = Path(tempfile.mkdtemp(dir=tmp_path))
        dc.save(make_state_dict(batch), path / "ours", TorchDistSaveShardedStrategy())
        dc.save(make_state_dict(batch), path / "planned", TorchDistSaveShardedStrategy(planner=ShardedSavePlanner))
        if all(case.spec.values().numel() for case in batch.cases):  # of empty boxes at one place, one is planned
            assert _data_files(path / "ours") == _data_files(path / "planned")
        wanted = Destinations(batch)
        loader = TorchDistLoadShardedStrategy(planner=ShardedLoadPlanner)
        wanted.check(
            dc.load(
                wanted.state(),
                path / "planned",
                loader,
                validate_access_integrity=batch.validate,
                allow_dtype_cast=True,
            )
        )

    for_all(save_load_cases(1, 1), count, check)
