from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning.shard_copies import (
    Assignment,
    ShardCopy,
    assign_holders,
    assign_shards,
    describe_copy,
    find_holders,
    shard_id,
)

cases = st.lists(
    st.tuples(st.sets(st.integers(0, 7), min_size=1).map(lambda ranks: tuple(sorted(ranks))), st.integers(0, 1000)),
    max_size=60,
)


@given(cases)
def test_every_shard_goes_to_a_holder(shards: list[tuple[tuple[int, ...], int]]) -> None:
    """A shard is written by a rank that has it, and the choice depends on the arguments alone."""
    holders, sizes = [ranks for ranks, _ in shards], [size for _, size in shards]
    chosen = assign_holders(holders, sizes)
    assert all(rank in ranks for rank, ranks in zip(chosen, holders, strict=True))
    assert chosen == assign_holders(list(holders), list(sizes))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 9))
def test_what_all_hold_is_balanced(sizes: list[int], ranks: int) -> None:
    """Largest first to the least loaded: no rank has more than the mean and one shard."""
    chosen = assign_holders([tuple(range(ranks))] * len(sizes), sizes)
    loads = [sum(size for size, rank in zip(sizes, chosen, strict=True) if rank == r) for r in range(ranks)]
    assert max(loads) <= sum(sizes) / ranks + max(sizes)


def test_scarce_shards_come_first() -> None:
    """What one rank alone holds counts before what others could take: the others take the rest."""
    assert assign_holders([(0, 1), (0,), (0, 1)], [10, 20, 10]) == [1, 0, 1]


def test_late_shards_come_last() -> None:
    """Shards that are named late are assigned when the loads of all others are known."""
    assert assign_holders([(0,), (0, 1)], [10, 10]) == [0, 1]
    assert assign_holders([(0,), (0, 1)], [10, 10], late={0}) == [0, 0]


class _Counted(int):
    """An integer that counts how often its like are compared."""

    comparisons = 0

    def __add__(self, other: int) -> _Counted:
        return _Counted(int(self) + int(other))

    __radd__ = __add__

    def __lt__(self, other: object) -> bool:
        _Counted.comparisons += 1
        return int.__lt__(self, other)  # type: ignore[operator]

    def __eq__(self, other: object) -> bool:
        _Counted.comparisons += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


@pytest.mark.parametrize("ranks", [8, 64, 512])
def test_a_shard_costs_the_logarithm_of_the_ranks(ranks: int) -> None:
    """Loads are compared about log N times a shard, not N times: 10,000 shards on 1,024 ranks are no minute's work."""
    halves = [tuple(range(ranks // 2)), tuple(range(ranks // 2, ranks)), tuple(range(0, ranks, 2))]
    holders = [halves[number % 3] for number in range(4000)]
    _Counted.comparisons = 0
    assign_holders(holders, [_Counted(1 + number % 7) for number in range(4000)])
    assert _Counted.comparisons < 4000 * 8 * math.log2(ranks)
    if ranks == 512:
        assert _Counted.comparisons < 4000 * ranks / 4


@given(st.lists(st.lists(st.sampled_from("abcdef"), max_size=8), max_size=6))
def test_holders_are_those_who_list_a_shard(everyone: list[list[str]]) -> None:
    """Each rank is named once a shard, in ascending order; shards stand in the order of their first mention."""
    holders = find_holders(everyone)
    assert list(holders) == list(dict.fromkeys(shard for shards in everyone for shard in shards))
    for shard, found in holders.items():
        assert found == tuple(rank for rank, shards in enumerate(everyone) if shard in shards)


def test_copies_have_one_id_and_other_shards_have_others() -> None:
    """Copies differ in data and replica id alone; a shard of another kind, place, shape or slice is another one."""
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.zeros(3), (2, 4), flattened_range=slice(0, 3))
    shards = [
        ShardedTensor("w", torch.zeros(2, 4), torch.float32, (2, 4), (4, 4), (0, 0), None),
        ShardedTensor("w", torch.zeros(2, 4), torch.float32, (2, 4), (4, 4), (2, 0), None),
        ShardedTensor("w", torch.zeros(0, 4), torch.float32, (0, 4), (4, 4), (0, 0), None),
        ShardedTensor("v", torch.zeros(2, 4), torch.float32, (2, 4), (4, 4), (0, 0), None),
        flat,
        ShardedObject("w", 1, (2, 4), (0, 0)),
        ShardedObject("w", 1, (4, 4), (0, 0)),
    ]
    ids = [shard_id(shard) for shard in shards]
    assert len(set(ids)) == len(shards)
    for shard, expected in zip(shards, ids, strict=True):
        copy = shard.without_data()
        copy.replica_id = 1
        assert shard_id(copy) == expected


def test_shards_of_other_groups_are_left_out_or_come_last() -> None:
    """A shard whose main replica is in another group is not written here; where it is read, it comes last."""
    small = describe_copy(ShardedObject("o", None, (1,), (0,), replica_id=1))
    large = ShardCopy("w", 10**6, is_main=True)
    copies = [[small, large], [small], [large]]
    assert assign_shards(copies, main_only=True) == {"w": Assignment(0, (0, 2))}
    assert assign_shards(copies, main_only=False) == {
        small.shard: Assignment(1, (0, 1)),
        "w": Assignment(0, (0, 2)),
    }
