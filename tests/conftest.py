"""Fixtures that all tests share."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from tests.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    """Take Ctrl-C as usual even where pytest was started in the background, which ignores it: some tests send it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Groups of 1 to 4 gloo ranks: ``ranks.run(3, function, *args)``."""
    pool = RankPool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def many_ranks() -> Iterator[RankPool]:
    """Groups of up to 8 ranks, for slow tests."""
    pool = RankPool(8)
    yield pool
    pool.close()
