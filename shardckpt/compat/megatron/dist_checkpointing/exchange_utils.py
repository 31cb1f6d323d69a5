"""megatron.core.dist_checkpointing.exchange_utils."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from shardckpt.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.parallel import distribution
from shardckpt.parallel.distribution import ShardDistribution, distribute_shards_to_ranks
from shardckpt.wrappers import is_quantized as is_float8tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.mapping import ShardedStateDict, ShardedTensor
    from shardckpt.parallel.distribution import ShardId


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: ProcessGroup | None = None,
    ignore_groups: bool = False,
    pg_cache_path: str | None = None,
    pg_cache_create: bool = False,
) -> ShardDistribution:
    """As ours; a cache of distributions on disk, which Megatron never checks, is refused."""
    refuse_group_cache(pg_cache_path, pg_cache_create)
    return distribution.determine_main_replica_uniform_distribution(
        sharded_state_dict, parallelization_group, ignore_groups
    )


def exchange_by_distribution(
    loaded_tensors: Mapping[ShardId, torch.Tensor],
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: ProcessGroup | None = None,
    exchange_algo: str = "broadcast",
) -> dict[ShardId, torch.Tensor]:
    """As ours, by Megatron's argument names."""
    return distribution.exchange_by_distribution(
        loaded_tensors, unloaded_shards, shard_distribution, parallelization_group, exchange_algo
    )


exchange_loaded_tensors_broadcast = partial(exchange_by_distribution, exchange_algo="broadcast")
exchange_loaded_tensors_gather_rounds = partial(exchange_by_distribution, exchange_algo="gather_rounds")
exchange_loaded_tensors_gather_object = partial(exchange_by_distribution, exchange_algo="gather_object")


def exchange_loaded_objects_gather_object(loaded_objects: Mapping[Any, Any]) -> dict[Any, Any]:
    """The objects of all ranks, on every rank."""
    return {key: value for loaded in Comm().all_gather(dict(loaded_objects)) for key, value in loaded.items()}


def refuse_group_cache(pg_cache_path: str | None, pg_cache_create: bool) -> None:
    """Raise if a cache of distributions on disk is asked for."""
    if pg_cache_path is not None or pg_cache_create:
        raise CheckpointingException(
            "pg_cache_path: a stored distribution cannot be checked against the shards of all ranks; "
            "do_cache_distribution=True keeps one in memory for as long as it is right"
        )


__all__ = [
    "ShardDistribution",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "exchange_loaded_objects_gather_object",
    "exchange_loaded_tensors_broadcast",
    "exchange_loaded_tensors_gather_object",
    "exchange_loaded_tensors_gather_rounds",
    "is_float8tensor",
]
