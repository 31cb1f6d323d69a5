"""megatron.core.dist_checkpointing.strategies.fully_parallel."""

from __future__ import annotations

from typing import Any

from shardckpt import parallel
from shardckpt.compat.megatron.abcs import AsyncSaveShardedStrategy, LoadShardedStrategy
from shardckpt.compat.megatron.by_path import LoadsByPath, SavesByPath
from shardckpt.compat.megatron.dist_checkpointing.exchange_utils import refuse_group_cache
from shardckpt.parallel.distribution import distribute_main_replicas_with_precomputed_distribution


class FullyParallelSaveStrategyWrapper(
    SavesByPath, parallel.FullyParallelSaveStrategyWrapper, AsyncSaveShardedStrategy
):
    """As ours; a cache of distributions on disk, which Megatron never checks, is refused."""

    def __init__(
        self, *args: Any, pg_cache_path: str | None = None, pg_cache_create: bool = False, **kwargs: Any
    ) -> None:
        refuse_group_cache(pg_cache_path, pg_cache_create)
        super().__init__(*args, **kwargs)


class FullyParallelLoadStrategyWrapper(LoadsByPath, parallel.FullyParallelLoadStrategyWrapper, LoadShardedStrategy):
    """As ours; a cache of distributions on disk, which Megatron never checks, is refused."""

    def __init__(
        self, *args: Any, pg_cache_path: str | None = None, pg_cache_create: bool = False, **kwargs: Any
    ) -> None:
        refuse_group_cache(pg_cache_path, pg_cache_create)
        super().__init__(*args, **kwargs)


__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "distribute_main_replicas_with_precomputed_distribution",
]
