"""What the tests of long wait share."""

from __future__ import annotations

import pytest

from shardckpt.distributed import long_wait


@pytest.fixture(autouse=True)
def nothing_said_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what has been said, before and after each test."""
    monkeypatch.setattr(long_wait, "_next_notice", {})
    monkeypatch.setattr(long_wait, "_waits", [])
