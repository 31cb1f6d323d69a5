from __future__ import annotations

import random

import torch

from benchmarks.simulation.reading import simulate
from shardckpt.parallel.reading_plan import WantedColumns, WantedShard, find_shared, list_shareable, list_wanted
from shardckpt.planning.shard_copies import find_holders

SETTINGS = ("broadcast", 1 << 20)


def _want(name: str, device_type: str = "cpu") -> WantedShard:
    return WantedShard(name, (2,), torch.float32, 8, device_type)


def test_what_digests_find_is_what_ids_say() -> None:
    """Ranks that want the same shards find each other, in the order of the ids, also where some ranks want nothing."""
    for seed in range(20):
        rng = random.Random(seed)
        ids = [[f"w{rng.randrange(30)}" for _ in range(rng.randrange(12))] for _ in range(7)]
        ids[rng.randrange(7)] = []
        devices = {f"w{n}": rng.choice(["cpu", "cuda"]) for n in range(30)}
        wants = [list_shareable([_want(name, devices[name]) for name in names]) for names in ids]
        shared = find_shared([list_wanted(mine, SETTINGS) for mine in wants])
        expected = {name: held for name, held in find_holders(ids).items() if len(held) > 1}
        assert shared.holders == list(expected.values())
        names = [
            {wants[rank][number].shard for rank, number in zip(held, numbers, strict=True)}
            for held, numbers in zip(shared.holders, shared.numbers, strict=True)
        ]
        assert names == [{name} for name in expected]
        assert shared.device_types == [devices[name] for name in expected]


def test_destinations_on_several_kinds_of_device_are_noticed() -> None:
    """A shard that goes to a GPU on one rank and to the CPU on another has no kind of device of its own."""
    listed = [list_wanted([_want("a", "cuda"), _want("b")], SETTINGS), list_wanted([_want("b"), _want("a")], SETTINGS)]
    assert find_shared(listed).device_types == [None, "cpu"]


def test_digests_that_agree_by_half_are_not_shared() -> None:
    """Different shards are never taken for one another, even if half of their digests is the same by chance."""
    halves = [b"12345678" + b"abcdefgh", b"12345678" + b"ABCDEFGH"]
    listed = [WantedColumns(SETTINGS, half, ("cpu",), b"\0") for half in halves]
    assert find_shared(listed).holders == []
    assert find_shared([listed[0], listed[0]]).holders == [(0, 1)]


def test_what_one_rank_wants_costs_the_others_a_digest() -> None:
    """A plan of 64 ranks that share nothing moves less than 20 bytes a shard and makes no transfer."""
    _, received, transfers = simulate(64, 100, 1)
    assert transfers == 0
    assert received < 20 * 100 * 63
    assert simulate(64, 100, 8)[2] == 8 * 100
