"""Every test in every mode of saving, with nothing remembered from another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.async_save import release_memory
from tests.engine.plan_cache.saves import in_mode

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["foreground", "background"])
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """How this process, and those that are told, save."""
    in_mode(request.param, list)
    yield request.param
    release_memory()
