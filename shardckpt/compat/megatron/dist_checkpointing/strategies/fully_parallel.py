"""megatron.core.dist_checkpointing.strategies.fully_parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.distributed import Comm
from shardckpt.mapping import ShardedTensor
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from shardckpt.mapping import ShardedStateDict

from typing import Any

from shardckpt import parallel
from shardckpt.compat.megatron.abcs import AsyncSaveShardedStrategy, LoadShardedStrategy
from shardckpt.compat.megatron.by_path import LoadsByPath, SavesByPath
from shardckpt.compat.megatron.dist_checkpointing.exchange_utils import ShardDistribution, refuse_group_cache
from shardckpt.compat.megatron.dist_checkpointing.utils import _sharded_tensor_shard_id


class FullyParallelSaveStrategyWrapper(
    SavesByPath, parallel.FullyParallelSaveStrategyWrapper, AsyncSaveShardedStrategy
):
    """:class:`shardckpt.parallel.FullyParallelSaveStrategyWrapper`; refuses a cache on disk, which nothing checks."""

    def __init__(
        self, *args: Any, pg_cache_path: str | None = None, pg_cache_create: bool = False, **kwargs: Any
    ) -> None:
        refuse_group_cache(pg_cache_path, pg_cache_create)
        super().__init__(*args, **kwargs)


class FullyParallelLoadStrategyWrapper(LoadsByPath, parallel.FullyParallelLoadStrategyWrapper, LoadShardedStrategy):
    """:class:`shardckpt.parallel.FullyParallelLoadStrategyWrapper`; refuses a cache on disk, which nothing checks."""

    def __init__(
        self, *args: Any, pg_cache_path: str | None = None, pg_cache_create: bool = False, **kwargs: Any
    ) -> None:
        refuse_group_cache(pg_cache_path, pg_cache_create)
        super().__init__(*args, **kwargs)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict, group: ProcessGroup | None, distribution: ShardDistribution
) -> None:
    """Set the replica ids of the caller's shards by a distribution, in place: 0 on the main rank, 1 elsewhere."""
    rank = Comm(group).rank
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor):
            is_main = distribution.main_rank_for_shard.get(_sharded_tensor_shard_id(shard)) == rank
            shard.replica_id = 0 if is_main else 1


__all__ = [
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "distribute_main_replicas_with_precomputed_distribution",
]
