"""Fully parallel saves and loads: what several ranks hold or want is written, or read, by one of them."""

from shardckpt.parallel.distribution import (
    ShardDistribution,
    ShardId,
    determine_main_replica_uniform_distribution,
    distribute_shards_to_ranks,
    sharded_tensor_shard_id,
)
from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper
from shardckpt.parallel.save import FullyParallelSaveStrategyWrapper, share_out
from shardckpt.parallel.transfers import Transfer, check_algorithm, exchange

__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "ShardDistribution",
    "ShardId",
    "Transfer",
    "check_algorithm",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange",
    "sharded_tensor_shard_id",
    "share_out",
]
