"""What the core of a save moves between ranks: bytes are counted, and bounded for 16,384 ranks."""

from __future__ import annotations

import pytest

from benchmarks.simulation.traffic import count_record_traffic, count_traffic
from tests.traffic import KIB, MIB

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
