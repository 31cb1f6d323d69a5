"""Megatron's names for dealing shards out, for code that does so by itself."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor, is_main_replica
from shardckpt.planning import deal, holders_by_shard
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
    with comm.collective_phase("listing shards"):
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


__all__ = [
    "ShardDistribution",
    "ShardId",
    "determine_main_replica_uniform_distribution",
    "distribute_shards_to_ranks",
    "sharded_tensor_shard_id",
]
