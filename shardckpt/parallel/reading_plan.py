"""The plan of a fully parallel load: which rank reads which shard, and which ranks it sends it to."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CheckpointingException
from shardckpt.parallel.transfers import Transfer, choose_device
from shardckpt.planning.shard_copies import assign_holders

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from shardckpt.distributed.comm import Comm

#: Bytes of a digest: two integers. The first finds the ranks that want the same shard, the second confirms it.
_DIGEST_BYTES = 16


class WantedShard(NamedTuple):
    """A shard that a rank wants, as other ranks need to know it.

    Attributes:
        shard: An id that is equal on all ranks that can share one read; else unique to this rank. Its ``repr``
            describes it completely.
        shape: Of the local tensor, as are dtype and bytes.
        device_type: Kind of device of its destination.
        can_share: Whether another rank may want the same.
    """

    shard: Hashable
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    device_type: str
    can_share: bool = True


class ReadingPlan(NamedTuple):
    """The assignment of shards to ranks that read them, and the ranks they are sent to.

    A position is the index of a shard among the shards that this rank wants.

    Attributes:
        reads: Positions of the shards that this rank reads.
        transfers: The shards that ranks of the group send each other; the same, in the same order, on every rank. The
            keys are the ids of the shards that this rank sends or receives, and numbers for other ranks' shards.
        positions: Positions of the shards that this rank sends or receives, by id.
        repeats: For each shard that this rank wants a second time: its position, and the position of the first.
    """

    reads: list[int]
    transfers: dict[Hashable, Transfer]
    positions: dict[Hashable, int]
    repeats: list[tuple[int, int]]


class WantedColumns(NamedTuple):
    """The shards that a rank wants and may share, in columns: 17 bytes a shard.

    Attributes:
        settings: The algorithm of the exchange and the bytes of a round, to be compared.
        digests: A digest of the id of each shard, one after the other.
        device_types: The kinds of device.
        devices: For each shard, the index of its kind of device, in a byte.
    """

    settings: tuple[str, int]
    digests: bytes
    device_types: tuple[str, ...]
    devices: bytes


class SharedShards(NamedTuple):
    """The shards that several ranks want, in the order in which ranks list them first; the same on every rank.

    Attributes:
        holders: For each shard, the ranks that want it, ascending.
        numbers: For each shard, and each of those ranks, the index of the shard in the rank's list.
        device_types: For each shard, the kind of device of all its destinations; None if they differ.
    """

    holders: list[tuple[int, ...]]
    numbers: list[tuple[int, ...]]
    device_types: list[str | None]


class SharedShardInfo(NamedTuple):
    """A rank's message about its shards, once all ranks know which ones they share.

    ``alone`` is the bytes that it reads for itself alone: the others take more of the shared ones. ``shards`` has
    shape, dtype and bytes of the shared shards that it holds first, in their order.
    """

    alone: int
    shards: list[tuple[tuple[int, ...], torch.dtype, int]]


def plan_reading(wants: Sequence[WantedShard], settings: tuple[str, int], group: Comm) -> ReadingPlan:
    """Collective: assign the shards to the ranks of the group that read them.

    Ranks first exchange digests, then sizes of the shards that several want: a job of 2,816 ranks that want 1,000
    shards each moves 48 MB to each rank, and no object is made for a shard that only one rank wants. Tied shards have
    one id. ``settings`` are the algorithm of the exchange and the bytes of a round; that they differ is an error on
    every rank.
    """
    # the position at which this rank wants each shard first: reversed, so that the first one is written last
    first = {want.shard: position for position, want in reversed(list(enumerate(wants)))}
    with group.collective_phase("assigning reads"):
        # with "direct" nothing is shared: only the settings travel, to be compared
        shareable = [] if settings[0] == "direct" else list_shareable(wants)
        listed = list_wanted(shareable, settings)
    everyone = group.all_gather(listed)
    with group.collective_phase("assigning reads"):
        _check_settings(everyone)
        shared = find_shared(everyone)
        alone = sum(wants[position].nbytes for position in first.values())
        described = describe_shared(shareable, shared, alone, group.rank)
    parts = group.all_gather(described) if shared.holders else []
    with group.collective_phase("assigning reads"):
        transfers, sources = _plan_transfers(shareable, shared, parts, group)
        plan = ReadingPlan(
            reads=sorted(position for shard, position in first.items() if sources.get(shard, group.rank) == group.rank),
            transfers=transfers,
            positions={shard: first[shard] for shard in sources},
            repeats=[(number, first[want.shard]) for number, want in enumerate(wants) if first[want.shard] != number],
        )
    return plan


def list_shareable(wants: Sequence[WantedShard]) -> list[WantedShard]:
    """Return the shards that other ranks may want too, each once."""
    found: dict[Hashable, WantedShard] = {}
    for want in wants:
        if want.can_share:
            found.setdefault(want.shard, want)
    return list(found.values())


def list_wanted(shareable: Sequence[WantedShard], settings: tuple[str, int]) -> WantedColumns:
    """Return the columns that a rank sends to all others."""
    kinds = {kind: number for number, kind in enumerate(dict.fromkeys(want.device_type for want in shareable))}
    return WantedColumns(
        settings,
        b"".join(hashlib.blake2b(repr(want.shard).encode(), digest_size=_DIGEST_BYTES).digest() for want in shareable),
        tuple(kinds),
        bytes(kinds[want.device_type] for want in shareable),
    )


def find_shared(everyone: Sequence[WantedColumns]) -> SharedShards:
    """Find the shards that several ranks want."""
    counts = torch.tensor([len(listed.devices) for listed in everyone], device="cpu")
    starts = counts.cumsum(0) - counts
    if not counts.sum():
        return SharedShards([], [], [])
    digests = torch.frombuffer(bytearray().join(listed.digests for listed in everyone), dtype=torch.int64).view(-1, 2)
    # rows of equal digests become neighbours; stable: of these the ranks ascend
    keys, order = digests[:, 0].contiguous().sort(stable=True)
    changes = torch.ones(len(keys), dtype=torch.bool, device="cpu")
    changes[1:] = keys[1:] != keys[:-1]
    begins = changes.nonzero().flatten()
    sizes = begins.diff(append=torch.tensor([len(keys)], device="cpu"))
    # groups of several rows, in the order in which ranks list the shards first
    many = sizes > 1
    begins, sizes = begins[many], sizes[many]
    listing = order[begins].argsort()
    begins, sizes = begins[listing], sizes[listing]
    # the rows of all groups, one group after the other: ``owner`` is the group of each, ``ranks`` its rank
    within = torch.arange(int(sizes.sum()), device="cpu") - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    rows = order[begins.repeat_interleave(sizes) + within]
    owner = torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)
    ranks = torch.arange(len(everyone), device="cpu").repeat_interleave(counts)[rows]
    # different shards whose first integers are the same by chance are not shared
    same = _find_same(digests[rows, 1], owner, len(sizes))[0]
    names = sorted({kind for listed in everyone for kind in listed.device_types})
    codes = torch.frombuffer(
        bytearray().join(
            listed.devices.translate(bytes(names.index(kind) for kind in listed.device_types).ljust(256, b"\0"))
            for listed in everyone
        ),
        dtype=torch.uint8,
    )[rows]
    same_device, lowest = _find_same(codes, owner, len(sizes))  # the lowest is the only one where they are the same
    numbers = (rows - starts[ranks]).tolist()
    holders, places, kinds = [], [], []
    rank_list, end = ranks.tolist(), 0
    for size, is_same, is_one_device, code in zip(
        sizes.tolist(), same.tolist(), same_device.tolist(), lowest.tolist(), strict=True
    ):
        begin, end = end, end + size
        if is_same:
            holders.append(tuple(rank_list[begin:end]))
            places.append(tuple(numbers[begin:end]))
            kinds.append(names[code] if is_one_device else None)
    return SharedShards(holders, places, kinds)


def describe_shared(shareable: Sequence[WantedShard], shared: SharedShards, nbytes: int, rank: int) -> SharedShardInfo:
    """Describe the shared shards that a rank holds first; ``nbytes`` are all that it wants."""
    alone, shards = nbytes, []
    for holders, numbers in zip(shared.holders, shared.numbers, strict=True):
        if rank in holders:
            want = shareable[numbers[holders.index(rank)]]
            alone -= want.nbytes
            if holders[0] == rank:
                shards.append((want.shape, want.dtype, want.nbytes))
    return SharedShardInfo(alone, shards)


def _plan_transfers(
    shareable: Sequence[WantedShard], shared: SharedShards, parts: Sequence[SharedShardInfo], group: Comm
) -> tuple[dict[Hashable, Transfer], dict[Hashable, int]]:
    """Return the transfers of all ranks, and the sources of the transfers in which this rank has a part."""
    described = [iter(part.shards) for part in parts]
    forms = [next(described[holders[0]]) for holders in shared.holders]
    # each rank's own reads are one item: it weighs as much as its shards would
    every = [*((rank,) for rank in range(len(parts))), *shared.holders]
    weights = [*(part.alone for part in parts), *(nbytes for _, _, nbytes in forms)]
    chosen = assign_holders(every, weights)[len(parts) :]
    transfers: dict[Hashable, Transfer] = {}
    sources: dict[Hashable, int] = {}
    devices = {kind: "cpu" if kind is None else choose_device({kind}, group) for kind in set(shared.device_types)}
    rows = zip(shared.holders, shared.numbers, shared.device_types, forms, chosen, strict=True)
    for number, (holders, numbers, kind, (shape, dtype, _), source) in enumerate(rows):
        shard: Hashable = number
        if group.rank in holders:
            shard = shareable[numbers[holders.index(group.rank)]].shard
            sources[shard] = source
        targets = tuple(rank for rank in holders if rank != source)
        transfers[shard] = Transfer(shape, dtype, source, targets, devices[kind])
    return transfers, sources


def _find_same(values: torch.Tensor, owner: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each of ``count`` owners whether all its values are the same, and the lowest."""
    lowest = values.new_zeros(count).scatter_reduce(0, owner, values, "amin", include_self=False)
    highest = values.new_zeros(count).scatter_reduce(0, owner, values, "amax", include_self=False)
    return lowest == highest, lowest


def _check_settings(everyone: Sequence[WantedColumns]) -> None:
    for rank, listed in enumerate(everyone):
        if listed.settings != everyone[0].settings:
            raise CheckpointingException(
                f"ranks disagree on exchange_algo and round_bytes: {everyone[0].settings} on rank 0, {listed.settings} "
                f"on rank {rank} of the group; pass the same on every rank"
            )
