from __future__ import annotations

import torch

from shardckpt.mapping import BlockScales, ShardedObject, ShardedTensor
from shardckpt.strategy import StoredColumns


def test_columns_of_shards() -> None:
    """A strategy that describes shards has its columns from them: one row a tensor, the objects, and the scales."""
    codes = ShardedTensor.from_rank_offsets("codes", torch.zeros(2, 4), block_scales=BlockScales("scales", (1, 2)))
    tensors = [codes, ShardedTensor.from_global_shape("scales", torch.float16, (2, 2))]
    objects = [ShardedObject("o", None, (2,), (rank,)) for rank in range(2)]
    assert StoredColumns.from_shards(tensors, objects, ["step"]) == (
        ["codes", "scales"],
        [torch.float32, torch.float16],
        [(2, 4), (2, 2)],
        ["o/shard_0_2", "o/shard_1_2"],
        {"codes": BlockScales("scales", (1, 2))},
        ["step"],
    )
