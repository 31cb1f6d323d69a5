"""Megatron's names for dealing shards out and exchanging them, for code that does so by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import torch

from shardckpt.comm import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor, is_main_replica
from shardckpt.parallel.exchange import Transfer, check_algorithm, exchange
from shardckpt.planning.balance import deal, holders_by_shard
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping import ShardedStateDict

_K = TypeVar("_K", bound="Hashable")

#: Key, global offset, and start and stop of the flattened range if there is one.
ShardId: TypeAlias = "tuple[str, tuple[int, ...], tuple[int, int] | None]"


class ShardDistribution(NamedTuple):
    """Which rank of a group does the work for each shard; ranks are those of the group.

    Attributes:
        main_rank_for_shard: The rank that saves, or reads, each shard; the same in order on every rank.
        shards_in_this_group: The shards whose work is done in this group.
        shard_to_metadata: Their descriptions, without data.
        all_ranks_for_shard: The ranks that have, or want, each shard.
    """

    main_rank_for_shard: dict[ShardId, int]
    shards_in_this_group: set[ShardId]
    shard_to_metadata: dict[ShardId, ShardedTensor]
    all_ranks_for_shard: dict[ShardId, list[int]]


def sharded_tensor_shard_id(shard: ShardedTensor) -> ShardId:
    """What tells shards apart: key, global offset and flattened range."""
    part = shard.flattened_range
    return shard.key, tuple(shard.global_offset), None if part is None else (part.start, part.stop)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[_K, Sequence[int]],
    shard_to_size: Mapping[_K, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[_K] = (),
) -> dict[_K, int]:
    """Choose for each shard the least loaded of its ranks, by bytes; see :func:`shardckpt.planning.balance.deal`.

    Args:
        shard_to_ranks: The ranks that hold each shard.
        shard_to_size: Bytes of each shard.
        num_ranks: Number of ranks in the group.
        cross_parallelization_group_loads: Shards that are dealt last: those whose main replica is in another group.
    """
    for shard, ranks in shard_to_ranks.items():
        if not ranks or min(ranks) < 0 or max(ranks) >= num_ranks:
            raise CheckpointingException(f"shard {shard!r} is held by ranks {list(ranks)}, in a group of {num_ranks}")
    late = {number for number, shard in enumerate(shard_to_ranks) if shard in cross_parallelization_group_loads}
    holders = [tuple(sorted(set(ranks))) for ranks in shard_to_ranks.values()]
    chosen = deal(holders, [shard_to_size[shard] for shard in shard_to_ranks], late)
    return dict(zip(shard_to_ranks, chosen, strict=True))


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict, group: ProcessGroup | None = None, ignore_groups: bool = False
) -> ShardDistribution:
    """Deal the sharded tensors of all ranks of a group out among them; called on every rank of it.

    Args:
        sharded_state_dict: This rank's; it stays as it is.
        group: The ranks; by default all.
        ignore_groups: Deal every shard that the group has, even where its main replica is in another group (for loads).
    """
    comm = Comm(group)
    with comm.phase("listing shards"):
        shards = [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor)]
        described = [(sharded_tensor_shard_id(shard), shard.without_data()) for shard in shards]
    everyone = comm.all_gather(described)
    metadata = {number: shard for rank in reversed(everyone) for number, shard in reversed(rank)}
    main = {number for rank in everyone for number, shard in rank if is_main_replica(shard.replica_id)}
    everywhere = holders_by_shard([number for number, _ in rank] for rank in everyone)
    holders = {number: list(ranks) for number, ranks in everywhere.items() if ignore_groups or number in main}
    sizes = {number: math.prod(metadata[number].data_shape) * metadata[number].dtype.itemsize for number in holders}
    main_ranks = distribute_shards_to_ranks(holders, sizes, comm.world_size, set(holders) - main)
    return ShardDistribution(main_ranks, set(holders), {number: metadata[number] for number in holders}, holders)


def distribute_main_replicas_with_precomputed_distribution(
    sharded_state_dict: ShardedStateDict, group: ProcessGroup | None, distribution: ShardDistribution
) -> None:
    """Make the replica ids of the caller's shards say what the distribution says: 0 on the main rank, 1 elsewhere."""
    rank = Comm(group).rank
    for shard in nested_values(sharded_state_dict):
        if isinstance(shard, ShardedTensor):
            is_main = distribution.main_rank_for_shard.get(sharded_tensor_shard_id(shard)) == rank
            shard.replica_id = 0 if is_main else 1


def exchange_by_distribution(
    loaded_tensors: Mapping[ShardId, torch.Tensor],
    unloaded_shards: Mapping[ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    group: ProcessGroup | None = None,
    exchange_algo: str = "broadcast",
) -> dict[ShardId, torch.Tensor]:
    """What this rank has loaded, and what the others have loaded for it; called on every rank of the group.

    Args:
        loaded_tensors: What this rank has loaded: the shards of which it is the main rank.
        unloaded_shards: What it wants besides, into their data; memory is taken on the CPU where there is none.
        shard_distribution: Who has loaded what; the same on every rank.
        group: The ranks.
        exchange_algo: ``"broadcast"``, ``"gather_rounds"`` or ``"gather_object"``.
    """
    comm = Comm(group)
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


__all__ = [
    "ShardDistribution",
    "ShardId",
    "determine_main_replica_uniform_distribution",
    "distribute_main_replicas_with_precomputed_distribution",
    "distribute_shards_to_ranks",
    "exchange_by_distribution",
    "sharded_tensor_shard_id",
]
