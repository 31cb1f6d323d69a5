from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.distributed import comm as comm_module
from shardckpt.distributed import find_owner
from shardckpt.distributed.comm import Comm
from shardckpt.distributed.routing import Grid, join_parts, split_parts
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from tests.ranks import Ranks


@pytest.mark.parametrize("world", [*range(1, 41), 127, 128, 130, 1000])
def test_every_rank_reaches_every_other_in_two_hops(world: int) -> None:
    """Both ranks of a hop know each other as partners, for any number of ranks, and a hop has few partners."""
    grid = Grid(world, direct=1)
    first = [grid.first_hop(rank) for rank in range(world)]
    second = [grid.second_hop(rank) for rank in range(world)]
    for rank in range(world):
        for target in range(world) if world < 200 else range(0, world, 37):
            turn = grid.turn(rank, target)
            assert turn == rank or (turn in first[rank].receivers and rank in first[turn].senders)
            assert turn == target or (target in second[turn].receivers and turn in second[target].senders)
        # a receiver that does not expect a sender would leave it waiting, and the other way round
        assert all(rank in first[other].senders for other in first[rank].receivers)
        assert all(rank in first[other].receivers for other in first[rank].senders)
        assert max(len(first[rank].senders), len(second[rank].senders)) <= 2 * grid.width


def test_16_384_ranks_have_254_partners() -> None:
    """The number of connections of a rank grows with the root of the number of ranks."""
    grid = Grid(1 << 14, direct=64)
    for rank in (0, 129, (1 << 14) - 1):
        assert len(grid.first_hop(rank).receivers) + len(grid.second_hop(rank).receivers) == 254


def test_parts_of_a_message_come_back() -> None:
    """Parts of any size, and none, are joined and split."""
    parts = [(3, b"abc"), (0, b""), (70_000, bytes(1000))]
    assert list(split_parts(join_parts(parts))) == parts
    assert list(split_parts(b"")) == []


def test_owners_are_spread_and_lasting() -> None:
    """A name has the same owner in all processes, and no rank owns many names."""
    assert find_owner("layers.0.weight", 1 << 14) == 1384
    owners = [find_owner(f"layers.{number}.weight", 100) for number in range(10_000)]
    assert set(owners) == set(range(100))
    assert max(map(owners.count, set(owners))) < 150


#: Bytes of a message, by the sum of its two ranks modulo 4; None: it is not sent.
_SIZES = (0, 1, 1_000_000, None)


def _sends(direct: int) -> dict[int, tuple[bytes, int]]:
    comm_module.DIRECT_RANKS = direct
    try:
        comm = Comm()
        sizes = {to: _SIZES[(comm.rank + to) % 4] for to in range(comm.world_size)}
        found = comm.all_to_all({to: bytes([comm.rank]) * size for to, size in sizes.items() if size is not None})
        assert comm.all_to_all({}) == {}
        return {sender: (data[-1:], len(data)) for sender, data in found.items()}
    finally:
        comm_module.DIRECT_RANKS = 64


@pytest.mark.parametrize(("world", "direct"), [(1, 64), (2, 64), (4, 64), (3, 1), (4, 1)])
def test_bytes_reach_their_ranks(ranks: Ranks, world: int, direct: int) -> None:
    """Every rank has what was sent to it, directly and over a third rank, empty messages included."""
    for rank, found in enumerate(ranks.run(world, _sends, direct)):
        sizes = {sender: _SIZES[(sender + rank) % 4] for sender in range(world)}
        sent = {sender: size for sender, size in sizes.items() if size is not None}
        assert list(found) == list(sent)
        assert found == {sender: (bytes([sender]) if size else b"", size) for sender, size in sent.items()}


def _sends_to_nobody() -> str:
    comm = Comm()
    try:
        comm.all_to_all({7: b"x"} if comm.rank == 1 else {})
    except CheckpointingException as exc:
        return str(exc)
    return ""


def test_a_rank_that_does_not_exist_is_an_error_on_all(ranks: Ranks) -> None:
    """A message to nobody fails on every rank, with the same words."""
    one, other = ranks.run(2, _sends_to_nobody)
    assert "a message goes to rank 7, and the group has ranks 0 to 1" in one
    assert one == other
