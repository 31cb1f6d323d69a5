"""Long use: nothing grows, and jobs that are killed again and again lose no save that had returned."""

from __future__ import annotations

import mmap
import os

from tests.faults.soak import count_held, find_growth


def test_shared_memory_of_this_process_is_counted() -> None:
    """A mapping of shared memory is counted while it is there."""
    before = count_held()["shared memory"]
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, mmap.PAGESIZE)
    with mmap.mmap(descriptor, mmap.PAGESIZE):
        assert count_held()["shared memory"] == before + 1
    os.close(descriptor)
    assert count_held()["shared memory"] == before


def test_growth_is_found() -> None:
    """A descriptor that is lost with some saves, or memory, is growth; what was there after the warm-up is not."""
    first = {"saves": 10, "descriptors": 3, "threads": 1, "shared memory": 0, "resident MiB": 100}
    warm = {**first, "saves": 60, "descriptors": 9, "resident MiB": 300}
    assert find_growth([first, warm, {**warm, "saves": 200}]) == {}
    assert find_growth([first, warm, {**warm, "saves": 200, "descriptors": 10, "resident MiB": 340}]) == {
        "descriptors": 1,
        "resident MiB": 40,
    }
