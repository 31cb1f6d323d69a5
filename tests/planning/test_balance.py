from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardckpt.planning.balance import deal

cases = st.lists(
    st.tuples(st.sets(st.integers(0, 7), min_size=1).map(lambda ranks: tuple(sorted(ranks))), st.integers(0, 1000)),
    max_size=60,
)


@given(cases)
def test_every_shard_goes_to_a_holder(shards: list[tuple[tuple[int, ...], int]]) -> None:
    """A shard is written by a rank that has it, and the choice depends on the arguments alone."""
    holders, sizes = [ranks for ranks, _ in shards], [size for _, size in shards]
    chosen = deal(holders, sizes)
    assert all(rank in ranks for rank, ranks in zip(chosen, holders, strict=True))
    assert chosen == deal(list(holders), list(sizes))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 9))
def test_what_all_hold_is_dealt_evenly(sizes: list[int], ranks: int) -> None:
    """Largest first to the least loaded: no rank has more than the mean and one shard."""
    chosen = deal([tuple(range(ranks))] * len(sizes), sizes)
    loads = [sum(size for size, rank in zip(sizes, chosen, strict=True) if rank == r) for r in range(ranks)]
    assert max(loads) <= sum(sizes) / ranks + max(sizes)


def test_scarce_shards_come_first() -> None:
    """What one rank alone holds counts before what others could take: the others take the rest."""
    assert deal([(0, 1), (0,), (0, 1)], [10, 20, 10]) == [1, 0, 1]
