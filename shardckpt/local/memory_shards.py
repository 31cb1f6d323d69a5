"""In-memory shards of a group of ranks: assign each to one rank that keeps it, and send it to ranks that lack it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import KeyMismatchError, listed
from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.parallel.transfers import Transfer, choose_device, exchange_shards
from shardckpt.planning.shard_copies import assign_shards, describe_copy, find_holders, shard_id

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

    import torch

    from shardckpt.distributed.comm import Comm
    from shardckpt.mapping.base import ShardedBase
    from shardckpt.planning.shard_copies import ShardId


class KeptShards(NamedTuple):
    """The tensor shards that this rank keeps, of all that the ranks of a group have.

    ``described`` is the result of :func:`describe_shards` when they were assigned; ``kept`` has the ids of the shards
    that this rank keeps.
    """

    described: list[Hashable]
    kept: set[Hashable]


class _Tensor(NamedTuple):
    """A tensor that a rank keeps, as other ranks need to know it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


class _Inventory(NamedTuple):
    """A rank's announcement: the tensors that it keeps, and the kinds of device of the tensors that it lacks."""

    kept: dict[ShardId, _Tensor]
    lacking: dict[ShardId, str]


def describe_shards(shards: Iterable[ShardedBase]) -> list[Hashable]:
    """Return all of this rank's shards that their validation, and their assignment to ranks, depends on."""
    return [
        (describe_copy(shard), *((tuple(shard.global_shape), shard.dtype) if isinstance(shard, ShardedTensor) else ()))
        for shard in shards
    ]


def keep_share(
    shards: Sequence[ShardedTensor], group: Comm, cached: KeptShards | None, described: list[Hashable]
) -> KeptShards:
    """Collective: assign each shard to one rank of the group, which keeps it; return the shards that this rank keeps.

    ``data`` of this rank's shards that another rank keeps becomes None. ``cached`` is the result of an earlier call for
    the same shards, on all ranks or on none: assignments of different calls may leave a shard without a keeper.
    """
    if cached is None:
        assigned = assign_shards(group.all_gather([describe_copy(shard) for shard in shards]), main_only=False)
        cached = KeptShards(described, {shard for shard, found in assigned.items() if found.rank == group.rank})
    for shard in shards:
        if shard_id(shard) not in cached.kept:
            shard.data = None
    return cached


def fetch_shards(
    kept: Mapping[ShardId, torch.Tensor], lacking: Mapping[ShardId, ShardedTensor], group: Comm, algorithm: str
) -> dict[ShardId, torch.Tensor]:
    """Collective: get shards from the ranks that keep them; each is sent to the ranks that lack it, and to no others.

    Return the tensor of every shard that this rank lacked. ``data`` of a lacking shard is filled if it is plain and of
    the kept dtype; else the tensor is new memory. It is a KeyMismatchError if no rank keeps one of them.
    """
    tensors = {shard: _Tensor(tuple(data.shape), data.dtype, data.device.type) for shard, data in kept.items()}
    devices = {shard: "cpu" if lack.data is None else lack.data.device.type for shard, lack in lacking.items()}
    everyone = group.all_gather(_Inventory(tensors, devices))
    with group.local_phase("looking for shards"):
        transfers = _plan_transfers(everyone, group)
    return exchange_shards(transfers, kept, lacking, group, algorithm)


def _plan_transfers(everyone: Sequence[_Inventory], group: Comm) -> dict[ShardId, Transfer]:
    sources: dict[ShardId, tuple[int, _Tensor]] = {}
    for rank, inventory in enumerate(everyone):
        for shard, tensor in inventory.kept.items():
            sources.setdefault(shard, (rank, tensor))  # "atomic" keeps have several: the lowest rank sends
    targets = find_holders(inventory.lacking for inventory in everyone)
    lost = targets.keys() - sources.keys()
    if lost:
        named = listed(sorted(repr(shard[1:4]) for shard in lost))
        hint = "if they were made with algo='fully_parallel', pass that and the same group here, too; "
        raise KeyMismatchError(
            f"no rank of the group keeps these shards (key, offset, shape): {named}; "
            f"{hint if group.world_size == 1 else ''}shards must have the same offsets and shapes as when they were "
            "kept"
        )
    transfers = {}
    for shard, ranks in targets.items():
        source, tensor = sources[shard]
        device_types = {tensor.device_type, *(everyone[rank].lacking[shard] for rank in ranks)}
        transfers[shard] = Transfer(tensor.shape, tensor.dtype, source, ranks, choose_device(device_types, group))
    return transfers
