from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist import ShardedSavePlanner

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


def test_a_save_without_shards_has_only_common_state(tmp_path: Path) -> None:
    """A state dict of plain values is a checkpoint too: nothing is stored as a tensor or object."""
    dc.save({"step": 3}, tmp_path / "c")
    assert pickle.loads((tmp_path / "c" / ".metadata").read_bytes()).state_dict_metadata == {}
    assert not list((tmp_path / "c").glob("*.distcp"))
    assert dc.load({}, tmp_path / "c") == {"step": 3}


def _save_on_one_rank(path: str) -> None:
    mine = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(3))} if dist.get_rank() == 1 else {}
    dc.save(mine, path)


def test_a_rank_without_shards_writes_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """Only ranks that hold main replicas have a data file, and only real keys are in the metadata."""
    ranks.run(3, _save_on_one_rank, str(tmp_path / "c"))
    assert [path.name for path in (tmp_path / "c").glob("*.distcp")] == ["__1_0.distcp"]
    assert set(dc.load_sharded_metadata(tmp_path / "c")) == {"w"}


def test_metadata_json_has_megatrons_four_fields(tmp_path: Path) -> None:
    """Megatron 0.9 to 0.18 refuse unknown fields: there are exactly four."""
    dc.save({"step": 3}, tmp_path / "c")
    text = (tmp_path / "c" / "metadata.json").read_text()
    assert text == (
        '{"sharded_backend":"torch_dist","sharded_backend_version":1,"common_backend":"torch","common_backend_version":1}'
    )


def test_a_plan_has_an_item_a_shard_however_fine_the_grid(tmp_path: Path) -> None:
    """One expert of 61 layers by 256 experts is one item, not 15,616 (Megatron: 1.7 s a key)."""
    expert = torch.ones(4, 3)
    shard = ShardedTensor.from_rank_offsets("experts", expert, (0, 7, 61), (1, 9, 256), prepend_axis_num=2)
    planner = ShardedSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({"e": shard}, is_coordinator=True)
    (item,) = planner.create_local_plan().items
    assert item.tensor_data is not None
    assert tuple(item.tensor_data.chunk.offsets) == (7, 9, 0, 0)
    assert tuple(item.tensor_data.chunk.sizes) == (1, 1, 4, 3)
    assert tuple(item.tensor_data.size) == (61, 256, 4, 3)
