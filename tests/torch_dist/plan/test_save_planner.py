from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp

from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist import ShardedSavePlanner

if TYPE_CHECKING:
    from pathlib import Path


def test_a_plan_has_an_item_a_shard_however_fine_the_grid() -> None:
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


def test_readers_that_cast_keep_the_signs_of_a_negated_view(tmp_path: Path) -> None:
    """Values are stored as they are, not with torch's neg bit: its copy_ to float16 leaves that out."""
    view = torch._neg_view(torch.arange(-3.0, 3.0))
    dcp.save({"w": ShardedTensor.from_rank_offsets("w", view)}, checkpoint_id=tmp_path, planner=ShardedSavePlanner())
    half = {"w": torch.zeros(6, dtype=torch.float16)}
    dcp.load(half, checkpoint_id=tmp_path)
    assert half["w"].tolist() == [3, 2, 1, 0, -1, -2]
