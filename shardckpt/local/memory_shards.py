"""In-memory shards of a group of ranks: which rank keeps which, and how they come to the ranks that lack them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shardckpt.errors import KeyMismatchError
from shardckpt.parallel import Transfer, choose_device, exchange_shards
from shardckpt.planning import assign_shards, describe_copy, find_holders, shard_id

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch

    from shardckpt.distributed import Comm
    from shardckpt.mapping import ShardedTensor
    from shardckpt.planning import ShardCopy, ShardId


class KeptShards(NamedTuple):
    """The tensor shards that this rank keeps, of all that the ranks of a group have.

    Attributes:
        copies: The shards that this rank had when they were assigned.
        kept: The ids of those that it keeps.
    """

    copies: list[ShardCopy]
    kept: set[Hashable]


class _Tensor(NamedTuple):
    """A tensor that a rank keeps, as it announces it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


class _Announced(NamedTuple):
    """What a rank announces: the tensors that it keeps, and the kinds of device of the destinations that it lacks."""

    kept: dict[ShardId, _Tensor]
    lacking: dict[ShardId, str]


def keep_share(shards: Sequence[ShardedTensor], group: Comm, cached: KeptShards | None) -> KeptShards:
    """Collective: assign each shard to one rank of the group, which keeps it; take the data out of its other copies.

    Args:
        shards: This rank's.
        group: The ranks.
        cached: What an earlier call returned; it is used again if no rank has other shards than then.

    Returns:
        What this rank keeps; ``cached`` itself where that was used.
    """
    with group.local_phase("comparing with the last assignment"):
        copies = [describe_copy(shard) for shard in shards]
        is_unchanged = cached is not None and cached.copies == copies
    if not group.all_true(is_unchanged) or cached is None:
        assigned = assign_shards(group.all_gather(copies), main_only=False)
        cached = KeptShards(copies, {shard for shard, found in assigned.items() if found.rank == group.rank})
    for shard in shards:
        if shard_id(shard) not in cached.kept:
            shard.data = None
    return cached


def fetch_shards(
    kept: Mapping[ShardId, torch.Tensor], lacking: Mapping[ShardId, ShardedTensor], group: Comm, algorithm: str
) -> dict[ShardId, torch.Tensor]:
    """Collective: get shards from the ranks that keep them; each goes to those that lack it, and to no one else.

    Args:
        kept: This rank's.
        lacking: What this rank wants; its data is filled where it has the stored dtype.
        group: The ranks.
        algorithm: How shards travel; see :func:`shardckpt.parallel.transfers.exchange`.

    Returns:
        The tensor of every shard that this rank lacked: its data, or new memory where that was not filled.

    Raises:
        KeyMismatchError: no rank keeps one of them.
    """
    tensors = {shard: _Tensor(tuple(data.shape), data.dtype, data.device.type) for shard, data in kept.items()}
    devices = {shard: "cpu" if lack.data is None else lack.data.device.type for shard, lack in lacking.items()}
    everyone = group.all_gather(_Announced(tensors, devices))
    with group.local_phase("looking for shards"):
        transfers = _plan_transfers(everyone, group)
    return exchange_shards(transfers, kept, lacking, group, algorithm)


def _plan_transfers(everyone: Sequence[_Announced], group: Comm) -> dict[ShardId, Transfer]:
    sources: dict[ShardId, tuple[int, _Tensor]] = {}
    for rank, announced in enumerate(everyone):
        for shard, tensor in announced.kept.items():
            sources.setdefault(shard, (rank, tensor))
    targets = find_holders(announced.lacking for announced in everyone)
    _check_kept(targets.keys() - sources.keys(), group)
    transfers = {}
    for shard, ranks in targets.items():
        source, tensor = sources[shard]
        device_types = {tensor.device_type, *(everyone[rank].lacking[shard] for rank in ranks)}
        transfers[shard] = Transfer(tensor.shape, tensor.dtype, source, ranks, choose_device(device_types, group))
    return transfers


def _check_kept(lost: set[ShardId], group: Comm) -> None:
    if lost:
        named = sorted(repr(shard[1:4]) for shard in lost)
        why = "was each rank's share kept only? Then pass algo='fully_parallel' and the same group here too; " * (
            group.world_size == 1
        )
        raise KeyMismatchError(
            f"no rank of the group keeps these shards (key, offset, shape): {', '.join(named[:20])}; {why}shards must "
            "be cut as they were when they were kept"
        )


__all__ = ["KeptShards", "fetch_shards", "keep_share"]
