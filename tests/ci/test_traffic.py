"""What the core of a save moves between ranks: bytes are counted, and bounded for 16,384 ranks."""

from __future__ import annotations

from benchmarks.simulation.traffic import count_traffic
from tests.traffic import KIB


def test_ranks_with_different_replicas_ask_owners() -> None:
    """Where sets of replicated shards differ, no rank receives the ids of all, of which there would be 600 KiB."""
    found = count_traffic(96, 400, 4, replicated=400)["replicas"]
    # 400 ids of 16 bytes and as many answers of 8, each with the head of a message, over two hops
    assert found.sent <= 2 * 400 * (16 + 8 + 2 * 16) + 6 * KIB
    assert found.received <= 200 * KIB


def test_ranks_with_different_keys_send_them_to_owners() -> None:
    """No rank receives the tensors of all: what one receives depends little on how many sets of keys there are."""
    few, many = (count_traffic(96, 100, key_sets)["validation"] for key_sets in (4, 96))
    # 100 rows of 24 bytes, each with the head of a message, over two hops; small numbers beside them
    assert many.sent <= 2 * 100 * (24 + 12) + 6 * KIB
    assert many.received <= 1.25 * few.received
    assert many.received < 96 * 100 * 24 / 2  # half of the rows of all
