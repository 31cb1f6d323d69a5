from __future__ import annotations

import torch

from shardckpt.mapping import ShardedTensor
from shardckpt_torch_dist import ShardedSavePlanner


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
