from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import extract_matching_values
from shardckpt_torch_dist import ShardedLoadPlanner, ShardedSavePlanner
from shardckpt_torch_dist.plan import split
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


def _shard(value: float) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets("w", torch.full((2,), value))


def _load(folder: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    dcp.save(saved, checkpoint_id=folder, planner=ShardedSavePlanner())
    dcp.load(wanted, checkpoint_id=folder, planner=ShardedLoadPlanner())
    return wanted


def test_a_list_is_looked_through_once_however_many_values_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load of a list of dicts, as of the states of a data loader's workers, takes linear time."""
    walks: list[Any] = []

    def extract(values: Any, *args: Any, **kwargs: Any) -> Any:
        walks.append(values)
        return extract_matching_values(values, *args, **kwargs)

    monkeypatch.setattr(split, "extract_matching_values", extract)
    saved = [{"position": number, "seed": torch.tensor(number)} for number in range(50)]
    wanted = [{"position": 0, "seed": torch.tensor(0)} for _ in saved]
    assert _load(tmp_path, {"workers": saved}, {"workers": wanted}) == {"workers": saved}
    assert len(walks) <= 1


@table("nested", [False, True])
def test_shards_stay_in_a_list_whose_other_items_are_loaded(tmp_path: Path, nested: bool) -> None:
    """A stored list, of any length, replaces the items of a list that are no shards; what is no list is refused."""

    def wrap(*items: Any) -> dict[str, Any]:
        return {"list": [[*items]] if nested else [*items]}

    shard = _shard(0)
    loaded = _load(tmp_path / "a", wrap(_shard(1), 5, 6), wrap(shard, 0, 0))
    assert loaded == wrap(shard, 5, 6)
    assert shard.data is not None
    assert shard.data.tolist() == [1, 1]
    assert _load(tmp_path / "b", wrap(_shard(1), 5), wrap(shard, 0, 0)) == wrap(shard, 5)
    assert _load(tmp_path / "c", wrap(_shard(1), 5, 6, 7), wrap(shard, 0)) == wrap(shard, 5, 6, 7)
    with pytest.raises(CheckpointException, match=r"'list(\.0)?': the checkpoint has a value of type int for"):
        _load(tmp_path / "d", {"list": [5] if nested else 5, "a": _shard(1)}, wrap(_shard(0), 0))
