"""What the core of a save moves between ranks: bytes are counted, and bounded for 16,384 ranks."""

from __future__ import annotations

import pytest

from benchmarks.simulation.traffic import count_record_traffic, count_traffic

KIB, MIB = 1 << 10, 1 << 20
RANKS = 1 << 14


@pytest.mark.parametrize(("ranks", "limit"), [(512, 6 * MIB), pytest.param(RANKS, 8 * MIB, marks=pytest.mark.ci)])
def test_file_records_stay_small_however_many_ranks_save(ranks: int, limit: int) -> None:
    """With 1,000 segments a rank the main rank receives at most 8 MiB; the tables alone would be 168 MiB."""
    found = count_record_traffic(ranks, 1000)
    assert found.received < limit
    assert found.sent < (16 * KIB if ranks < RANKS else 1 * KIB)


def test_what_ranks_with_the_same_keys_move_does_not_grow_with_their_shards() -> None:
    """Of 10 and of 100 shards each, validation and the comparison with what was stored move the same bytes."""
    few, many = (count_traffic(16, shards) for shards in (10, 100))
    for phase in ("replicas", "validation", "recorded shards"):
        assert few[phase] == many[phase]
        assert many[phase].received <= 256 * 16


@pytest.mark.ci
def test_ranks_with_different_replicas_ask_owners() -> None:
    """Where sets of replicated shards differ, no rank receives the ids of all, of which there would be 600 KiB."""
    found = count_traffic(96, 400, 4, replicated=400)["replicas"]
    # 400 ids of 16 bytes and as many answers of 8, each with the head of a message, over two hops
    assert found.sent <= 2 * 400 * (16 + 8 + 2 * 16) + 6 * KIB
    assert found.received <= 200 * KIB


@pytest.mark.ci
def test_ranks_with_different_keys_send_them_to_owners() -> None:
    """No rank receives the tensors of all: what one receives depends little on how many sets of keys there are."""
    few, many = (count_traffic(96, 100, key_sets)["validation"] for key_sets in (4, 96))
    # 100 rows of 24 bytes, each with the head of a message, over two hops; small numbers beside them
    assert many.sent <= 2 * 100 * (24 + 12) + 6 * KIB
    assert many.received <= 1.25 * few.received
    assert many.received < 96 * 100 * 24 / 2  # half of the rows of all
