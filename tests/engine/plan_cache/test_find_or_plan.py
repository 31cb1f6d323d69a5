from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardckpt.distributed.comm import Comm
from shardckpt.engine.plan_cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.ranks import Ranks


class _Deals:
    """Counts deals; a deal is the list of all ranks' shares."""

    def __init__(self, group: Comm) -> None:
        self.count = 0
        self._group = group

    def of(self, share: Any) -> Callable[[], list[Any]]:
        def deal() -> list[Any]:
            self.count += 1
            return self._group.all_gather(share)

        return deal


def _deal(shares: list[list[Any]], enabled: bool) -> tuple[list[Any], list[int]]:
    comm = Comm()
    cache: PlanCache[list[Any]] = PlanCache(int(enabled))
    deals, got, counts = _Deals(comm), [], []
    for everyones in shares:
        got.append(cache.find_or_plan(everyones[comm.rank], comm, deals.of(everyones[comm.rank])))
        counts.append(deals.count)
    return got, counts


def test_a_change_on_one_rank_is_a_new_deal_on_all(ranks: Ranks) -> None:
    """The last deal is used if every rank's share is what it was for that deal, and never else."""
    shares = [[1, 2], [1, 2], [1, 3], [1, 3], [1, 2], [2, 1], [2, 1]]
    for enabled, expected in ((True, [1, 1, 2, 2, 3, 4, 4]), (False, [1, 2, 3, 4, 5, 6, 7])):
        for got, counts in ranks.run(2, _deal, shares, enabled):
            assert got == shares
            assert counts == expected


def _deal_that_fails_once() -> list[Any]:
    comm = Comm()
    cache: PlanCache[list[Any]] = PlanCache(1)
    cache.find_or_plan("old", comm, _Deals(comm).of("old"))

    def failing() -> list[Any]:
        everyone = comm.all_gather(f"new {comm.rank}")
        if comm.rank == 0:
            raise MemoryError
        return everyone

    share = "old" if comm.rank == 0 else "new 1"
    with suppress(MemoryError):
        cache.find_or_plan(share, comm, failing)
    return cache.find_or_plan(share, comm, _Deals(comm).of(share))


def test_a_deal_that_fails_is_forgotten_everywhere(ranks: Ranks) -> None:
    """After an error on one rank no two ranks go on with different deals."""
    assert ranks.run(2, _deal_that_fails_once) == [["old", "new 1"]] * 2
