"""Shards in the memory of a group of ranks: who keeps which, and how they come to those who lack them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException, KeyMismatchError
from shardckpt.mapping import ShardedTensor
from shardckpt.parallel import (
    ShardDistribution,
    Transfer,
    check_algorithm,
    determine_main_replica_uniform_distribution,
    exchange,
    sharded_tensor_shard_id,
)
from shardckpt.planning import holders_by_shard
from shardckpt.state_dict import nested_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed import ProcessGroup

    from shardckpt.mapping import ShardedStateDict

#: What copies of the same tensor shard have in common: key, offset, local shape, and the flattened range.
ShardId: TypeAlias = tuple[Any, ...]


class _Part(NamedTuple):
    """What a rank keeps or lacks of a shard: its id and dtype, and the kind of its memory's device."""

    shard: ShardId
    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


class _Told(NamedTuple):
    """What a rank tells the others."""

    keeps: list[_Part]
    lacks: list[_Part]


def shard_id(shard: ShardedTensor) -> ShardId:
    """What copies of the same tensor shard have in common."""
    part = shard.flattened_range
    flat = None if part is None else (part.start, part.stop)
    return (shard.key, tuple(shard.global_offset), tuple(shard.local_shape), flat)


def deal_shards(
    nest: ShardedStateDict, group: ProcessGroup | None, cached: ShardDistribution | None
) -> ShardDistribution:
    """Choose, by bytes, one rank of the group for every tensor shard that some of its ranks have.

    Args:
        nest: This rank's shards.
        group: The ranks.
        cached: A deal that still holds if no rank has other shards than then.
    """
    comm = Comm(group)
    with comm.local_phase("comparing with the last deal"):
        fits = cached is not None and _still_fits(cached, nest, comm.rank)
    if comm.all_true(fits) and cached is not None:
        return cached
    return determine_main_replica_uniform_distribution(nest, group, ignore_groups=True)


def drop_others(nest: ShardedStateDict, distribution: ShardDistribution, group: ProcessGroup | None) -> None:
    """Take the data out of the shards that the deal leaves to other ranks."""
    rank = Comm(group).rank
    for leaf in nested_values(nest):
        if isinstance(leaf, ShardedTensor) and distribution.main_rank_for_shard[sharded_tensor_shard_id(leaf)] != rank:
            leaf.data = None


def fetch_shards(
    kept: Mapping[ShardId, torch.Tensor], lacking: Mapping[ShardId, ShardedTensor], group: Comm, algorithm: str
) -> dict[ShardId, torch.Tensor]:
    """Get shards from ranks that keep them; each goes to those who lack it, and to no one else.

    Args:
        kept: This rank's.
        lacking: What this rank wants; its data is filled where it has the stored dtype, else there is new memory.
        group: The ranks, all of which call.
        algorithm: How shards travel; see :func:`shardckpt.parallel.transfers.exchange`.

    Raises:
        KeyMismatchError: no rank keeps one of them.
    """
    keeps = [_Part(shard, tuple(data.shape), data.dtype, data.device.type) for shard, data in kept.items()]
    lacks = [_Part(shard, lack.data_shape, lack.dtype, _device_type(lack)) for shard, lack in lacking.items()]
    everyone = group.all_gather(_Told(keeps, lacks))
    with group.collective_phase("looking for shards"):
        sources = _sources(everyone, group)
        transfers = _transfers(everyone, sources, group)
        fetched = {shard: _memory(lack, sources[shard][1].dtype) for shard, lack in lacking.items()}
    if transfers:
        tensors = [kept[shard] if shard in kept else fetched.get(shard) for shard in transfers]
        exchange(list(transfers.values()), tensors, group, algorithm)
    return fetched


def _still_fits(cached: ShardDistribution, nest: ShardedStateDict, rank: int) -> bool:
    """Whether this rank has the shards that it had when they were dealt."""
    then = {
        number: (cached.shard_to_metadata[number].data_shape, cached.shard_to_metadata[number].dtype)
        for number, ranks in cached.all_ranks_for_shard.items()
        if rank in ranks
    }
    shards = (leaf for leaf in nested_values(nest) if isinstance(leaf, ShardedTensor))
    return then == {sharded_tensor_shard_id(shard): (shard.data_shape, shard.dtype) for shard in shards}


def check_exchange(algorithm: str) -> None:
    """Raise :class:`CheckpointingException` if shards in memory cannot travel like that."""
    check_algorithm(algorithm)
    if algorithm == "direct":
        raise CheckpointingException("exchange_algo='direct' has ranks read for themselves: here nothing is stored")


def _sources(everyone: Sequence[_Told], group: Comm) -> dict[ShardId, tuple[int, _Part]]:
    """The first rank that keeps each shard."""
    found: dict[ShardId, tuple[int, _Part]] = {}
    for rank, told in enumerate(everyone):
        for part in told.keeps:
            found.setdefault(part.shard, (rank, part))
    lost = sorted({repr(part.shard[:3]) for told in everyone for part in told.lacks if part.shard not in found})
    if lost:
        why = "was each rank's share kept only? Then pass algo='fully_parallel' and the same group here too; " * (
            group.world_size == 1
        )
        raise KeyMismatchError(
            f"no rank of the group keeps these shards (key, offset, shape): {', '.join(lost[:20])}; {why}shards must "
            "be cut as they were when they were kept"
        )
    return found


def _transfers(
    everyone: Sequence[_Told], sources: Mapping[ShardId, tuple[int, _Part]], group: Comm
) -> dict[ShardId, Transfer]:
    seekers = holders_by_shard([part.shard for part in told.lacks] for told in everyone)
    devices = {(rank, part.shard): part.device_type for rank, told in enumerate(everyone) for part in told.lacks}
    transfers = {}
    for shard, ranks in seekers.items():
        reader, part = sources[shard]
        ends = {part.device_type, *(devices[rank, shard] for rank in ranks)}
        way = part.device_type if len(ends) == 1 and group.moves(part.device_type) else "cpu"
        transfers[shard] = Transfer(part.shape, part.dtype, reader, ranks, way)
    return transfers


def _device_type(shard: ShardedTensor) -> str:
    return "cpu" if shard.data is None else shard.data.device.type


def _memory(shard: ShardedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Where a shard from another rank goes: its destination, if that has the same dtype."""
    data = shard.data
    if data is not None and data.dtype == dtype and type(data) in (torch.Tensor, torch.nn.Parameter):
        return data.detach()
    return torch.empty(shard.data_shape, dtype=dtype, device="cpu" if data is None else data.device)


__all__ = ["ShardId", "check_exchange", "deal_shards", "drop_others", "fetch_shards", "shard_id"]
