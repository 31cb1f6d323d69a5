"""megatron.core.dist_checkpointing.exchange_utils."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import (
    ShardDistribution,
    ShardId,
    Transfer,
    check_algorithm,
    distribute_shards_to_ranks,
    exchange,
)
from shardckpt.parallel import determine_main_replica_uniform_distribution as determine_distribution
from shardckpt.tensors import is_quantized as is_float8tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import ProcessGroup

    from shardckpt.mapping import ShardedStateDict, ShardedTensor
    from shardckpt.parallel import ShardId


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: ProcessGroup | None = None,
    ignore_groups: bool = False,
    pg_cache_path: str | None = None,
    pg_cache_create: bool = False,
) -> ShardDistribution:
    """As ours; a cache of distributions on disk, which Megatron never checks, is refused."""
    refuse_group_cache(pg_cache_path, pg_cache_create)
    return determine_distribution(sharded_state_dict, parallelization_group, ignore_groups)


def exchange_by_distribution(
    loaded_tensors: Mapping[ShardId, torch.Tensor],
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: ProcessGroup | None = None,
    exchange_algo: str = "broadcast",
) -> dict[ShardId, torch.Tensor]:
    """What this rank has loaded, and what the others have loaded for it; called on every rank of the group.

    Args:
        loaded_tensors: What this rank has loaded: the shards of which it is the main rank.
        unloaded_shards: What it wants besides, into their data; memory is taken on the CPU where there is none.
        shard_distribution: Who has loaded what; the same on every rank.
        parallelization_group: The ranks.
        exchange_algo: ``"broadcast"``, ``"gather_rounds"`` or ``"gather_object"``.
    """
    comm = Comm(parallelization_group)
    with comm.phase("preparing the exchange"):
        check_algorithm(exchange_algo)
        if exchange_algo == "direct":
            raise CheckpointingException("exchange_algo 'direct' exchanges nothing: load all shards on every rank")
        transfers = {number: _transfer(number, shard_distribution) for number in shard_distribution.main_rank_for_shard}
        tensors = {
            number: _checked(number, transfer, _party(number, transfer, comm.rank, loaded_tensors, unloaded_shards))
            for number, transfer in transfers.items()
            if comm.rank in (transfer.reader, *transfer.consumers)
        }
    comm.agree(exchange_algo=exchange_algo)
    exchange(list(transfers.values()), [tensors.get(number) for number in transfers], comm, exchange_algo)
    return {**loaded_tensors, **tensors}


def _transfer(number: ShardId, distribution: ShardDistribution) -> Transfer:
    shard, reader = distribution.shard_to_metadata[number], distribution.main_rank_for_shard[number]
    others = tuple(rank for rank in distribution.all_ranks_for_shard[number] if rank != reader)
    return Transfer(shard.data_shape, shard.dtype, reader, others)


def _party(
    number: ShardId,
    transfer: Transfer,
    rank: int,
    loaded: Mapping[ShardId, torch.Tensor],
    unloaded: Mapping[ShardId, ShardedTensor],
) -> torch.Tensor:
    """This rank's tensor of a shard: what it has loaded, or what it wants filled."""
    if rank == transfer.reader:
        if number not in loaded:
            raise CheckpointingException(f"shard {number} is not among the loaded tensors of its main rank {rank}")
        return loaded[number]
    if number not in unloaded:
        raise CheckpointingException(f"shard {number} is not among the unloaded shards of rank {rank}, which wants it")
    shard = unloaded[number]
    return torch.empty(shard.data_shape, dtype=shard.dtype, device="cpu") if shard.data is None else shard.data.detach()


def _checked(number: ShardId, transfer: Transfer, tensor: torch.Tensor) -> torch.Tensor:
    if (tuple(tensor.shape), tensor.dtype) != (transfer.shape, transfer.dtype):
        raise CheckpointingException(
            f"shard {number} is {tuple(tensor.shape)} {tensor.dtype} here, the distribution says {transfer.shape} "
            f"{transfer.dtype}"
        )
    return tensor


exchange_loaded_tensors_broadcast = partial(exchange_by_distribution, exchange_algo="broadcast")
exchange_loaded_tensors_gather_rounds = partial(exchange_by_distribution, exchange_algo="gather_rounds")
exchange_loaded_tensors_gather_object = partial(exchange_by_distribution, exchange_algo="gather_object")


def exchange_loaded_objects_gather_object(loaded_objects: Mapping[Any, Any]) -> dict[Any, Any]:
    """Collective: gather the objects of all ranks of the default group.

    Args:
        loaded_objects: This rank's objects by key.

    Returns:
        The objects of all ranks by key.
    """
    return {key: value for loaded in Comm().all_gather(dict(loaded_objects)) for key, value in loaded.items()}


def refuse_group_cache(pg_cache_path: str | None, pg_cache_create: bool) -> None:
    """Raise if the caller asks for a cache of distributions on disk."""
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
