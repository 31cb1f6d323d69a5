"""Fully parallel saves and loads: a shard that several ranks hold, or want, is written, or read, by one of them."""

from shardckpt.parallel.load import FullyParallelLoadStrategyWrapper, share_reading, split_budget
from shardckpt.parallel.save import FullyParallelSaveStrategyWrapper, assign_main_replicas
from shardckpt.parallel.transfers import Transfer, check_algorithm, choose_device, exchange_shards

__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "Transfer",
    "assign_main_replicas",
    "check_algorithm",
    "choose_device",
    "exchange_shards",
    "share_reading",
    "split_budget",
]
