"""megatron.core.dist_checkpointing.strategies.base."""

from __future__ import annotations

from shardckpt.compat.megatron.base_classes import (
    AsyncSaveShardedStrategy,
    LoadShardedStrategy,
    LoadStrategyBase,
    SaveShardedStrategy,
    SaveStrategyBase,
)
from shardckpt.compat.megatron.defaults import StrategyAction, get_default_strategy, register_default_strategy
from shardckpt.compat.megatron.refusals import make_refusing_getattr

REFUSED = {
    "LoadCommonStrategy": "the sharded strategy loads the common state: load_common of shardckpt.LoadStrategy",
    "SaveCommonStrategy": "the sharded strategy saves the common state: save of shardckpt.SaveStrategy gets it",
    "async_calls": "make an AsyncCallsQueue of your own and close it at the end",
    "default_strategies": "`shardckpt strategies` lists what is registered, register_default_strategy adds to it",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = [
    "AsyncSaveShardedStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "StrategyAction",
    "get_default_strategy",
    "register_default_strategy",
]
