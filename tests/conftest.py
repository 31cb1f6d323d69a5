"""Fixtures that all tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.ranks import RankPool

if TYPE_CHECKING:
    from collections.abc import Iterator


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
