"""What the tests of proof share."""

from __future__ import annotations

from shardckpt.mapping import ShardedTensor

whole = ShardedTensor.from_rank_offsets  # a tensor in one shard
