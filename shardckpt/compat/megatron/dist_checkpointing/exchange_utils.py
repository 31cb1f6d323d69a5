"""megatron.core.dist_checkpointing.exchange_utils."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardckpt.compat.megatron.dist_checkpointing.utils import _sharded_tensor_shard_id, _ShardId
from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.distributed.comm import Comm
from shardckpt.errors import CheckpointingException, listed
from shardckpt.mapping.base import is_main_replica
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.parallel.transfers import Transfer, check_algorithm, exchange_shards
from shardckpt.planning.shard_copies import ShardCopy, assign_holders, assign_shards, shard_nbytes
from shardckpt.state_dict import nested_values
from shardckpt.tensors.wrappers import is_quantized as is_float8tensor

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence

    import torch
    from torch.distributed import ProcessGroup

    from shardckpt.mapping.base import ShardedStateDict

_K = TypeVar("_K", bound="Hashable")


class ShardDistribution(NamedTuple):
    """The assignment of shards to the ranks of a group; ranks are numbers in the group.

    Attributes:
        main_rank_for_shard: The rank that saves or reads each shard, in the same order on every rank.
        shards_in_this_group: The shards that ranks of this group save or read.
        shard_to_metadata: Their descriptions, without data.
        all_ranks_for_shard: The ranks that hold each shard, or request it.
    """

    main_rank_for_shard: dict[_ShardId, int]
    shards_in_this_group: set[_ShardId]
    shard_to_metadata: dict[_ShardId, ShardedTensor]
    all_ranks_for_shard: dict[_ShardId, list[int]]


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[_K, Sequence[int]],
    shard_to_size: Mapping[_K, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[_K] = (),
) -> dict[_K, int]:
    """Choose for each shard the least loaded of its ranks, by bytes; see :func:`shardckpt.planning.assign_holders`.

    Args:
        shard_to_ranks: The ranks that hold each shard.
        shard_to_size: Bytes of each shard.
        num_ranks: Number of ranks in the group.
        cross_parallelization_group_loads: Shards that are assigned last: those whose main replica is in another group.

    Returns:
        The rank of each shard.

    Raises:
        CheckpointingException: a shard has no size, no rank, or a rank outside the group.
    """
    for shard, ranks in shard_to_ranks.items():
        # assign_holders trusts its callers; this one is a user
        if not ranks or min(ranks) < 0 or max(ranks) >= num_ranks:
            raise CheckpointingException(f"shard {shard!r} is held by ranks {list(ranks)}, in a group of {num_ranks}")
        if shard not in shard_to_size:
            raise CheckpointingException(f"shard {shard!r} has no size in shard_to_size: give its bytes")
    late = {number for number, shard in enumerate(shard_to_ranks) if shard in cross_parallelization_group_loads}
    holders = [tuple(sorted(set(ranks))) for ranks in shard_to_ranks.values()]
    chosen = assign_holders(holders, [shard_to_size[shard] for shard in shard_to_ranks], late)
    return dict(zip(shard_to_ranks, chosen, strict=True))


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: ProcessGroup | None = None,
    ignore_groups: bool = False,
    pg_cache_path: str | None = None,
    pg_cache_create: bool = False,
) -> ShardDistribution:
    """Collective: assign the sharded tensors of all ranks of a group to its ranks, balanced by bytes.

    Args:
        sharded_state_dict: This rank's state dict; it does not change.
        parallelization_group: The ranks; by default all.
        ignore_groups: Assign every shard that the group has, even if its main replica is in another group (for loads).
        pg_cache_path: Refused: nothing checks a distribution that is cached on disk.
        pg_cache_create: Refused too.

    Returns:
        The assignment, equal on all ranks.
    """
    refuse_group_cache(pg_cache_path, pg_cache_create)
    comm = Comm(parallelization_group)
    with comm.collective_phase("listing shards"):
        shards = [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedTensor)]
        described = [(_sharded_tensor_shard_id(shard), shard.without_data()) for shard in shards]
    everyone = comm.all_gather(described)
    # reversed: of a shard that several ranks describe, the lowest rank's description counts on all of them
    metadata = {number: shard for rank in reversed(everyone) for number, shard in reversed(rank)}
    copies = [
        [ShardCopy(n, shard_nbytes(shard), is_main_replica(shard.replica_id)) for n, shard in rank] for rank in everyone
    ]
    assigned = assign_shards(copies, main_only=not ignore_groups)
    return ShardDistribution(
        {number: assignment.rank for number, assignment in assigned.items()},
        set(assigned),
        {number: metadata[number] for number in assigned},
        {number: list(assignment.holders) for number, assignment in assigned.items()},
    )


def exchange_by_distribution(
    loaded_tensors: Mapping[_ShardId, torch.Tensor],
    unloaded_shards: Mapping[_ShardId, ShardedTensor],
    shard_distribution: ShardDistribution,
    parallelization_group: ProcessGroup | None = None,
    exchange_algo: str = "broadcast",
) -> dict[_ShardId, torch.Tensor]:
    """Collective: send the loaded tensors to the ranks that request them.

    Args:
        loaded_tensors: The tensors that this rank has loaded: the shards whose main rank it is.
        unloaded_shards: The other shards that it requests. Their data are filled; without data, memory is allocated on
            the CPU.
        shard_distribution: The assignment of shards to ranks, equal on every rank.
        parallelization_group: The ranks.
        exchange_algo: ``"broadcast"``, ``"gather_rounds"`` or ``"gather_object"``.

    Returns:
        The loaded and the received tensors by shard id.
    """
    comm = Comm(parallelization_group)
    with comm.collective_phase("preparing the exchange"):
        check_algorithm(exchange_algo)
        transfers = {}
        for number, source in shard_distribution.main_rank_for_shard.items():
            shard = shard_distribution.shard_to_metadata[number]
            targets = tuple(rank for rank in shard_distribution.all_ranks_for_shard[number] if rank != source)
            transfers[number] = Transfer(shard.data_shape, shard.dtype, source, targets)
        for number in unloaded_shards:
            if comm.rank not in shard_distribution.all_ranks_for_shard.get(number, ()):
                raise CheckpointingException(
                    f"shard {number} is not in the state dict that the distribution has of rank {comm.rank}, so that "
                    "no rank sends it: pass the distribution of these state dicts"
                )
            if unloaded_shards[number].dtype != transfers[number].dtype:
                raise CheckpointingException(
                    f"shard {number} is {unloaded_shards[number].dtype} here, the distribution says "
                    f"{transfers[number].dtype}: pass the distribution of these state dicts"
                )
    comm.agree(exchange_algo=exchange_algo)
    received = exchange_shards(transfers, loaded_tensors, unloaded_shards, comm, exchange_algo)
    return {**loaded_tensors, **{number: tensor.detach() for number, tensor in received.items()}}


exchange_loaded_tensors_broadcast = partial(exchange_by_distribution, exchange_algo="broadcast")
exchange_loaded_tensors_gather_rounds = partial(exchange_by_distribution, exchange_algo="gather_rounds")
exchange_loaded_tensors_gather_object = partial(exchange_by_distribution, exchange_algo="gather_object")


def exchange_loaded_objects_gather_object(loaded_objects: Mapping[Any, Any]) -> dict[Any, Any]:
    """Collective: gather the objects of all ranks of the default group.

    Args:
        loaded_objects: This rank's objects by key.

    Returns:
        The objects of all ranks by key.

    Raises:
        CheckpointingException: several ranks have loaded an object of the same key.
    """
    comm, found = Comm(), dict[Any, Any]()
    with comm.collective_phase("gathering objects"):
        own = dict(loaded_objects)
    for rank, loaded in enumerate(comm.all_gather(own)):
        if twice := found.keys() & loaded.keys():
            names = listed(sorted(map(str, twice)), limit=4)
            raise CheckpointingException(
                f"rank {rank} and a rank before it have loaded the same objects: {names}; one rank is to load each"
            )
        found |= loaded
    return found


def refuse_group_cache(pg_cache_path: str | None, pg_cache_create: bool) -> None:
    """Raise CheckpointingException if the caller asks for a cache of distributions on disk."""
    if pg_cache_path is not None or pg_cache_create:
        raise CheckpointingException(
            "pg_cache_path: a stored distribution cannot be checked against the shards of all ranks; "
            "do_cache_distribution=True keeps one in memory for as long as it is right"
        )


REFUSED = {
    "_shard_size": "shardckpt.planning.shard_nbytes(shard) counts a shard's bytes",
    "_get_empty_tensor_for_exchange": "exchange_by_distribution allocates what it receives",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

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
