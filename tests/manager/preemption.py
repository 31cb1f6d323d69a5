"""What the tests of preemption share."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """The SIGTERMs that come to the handler that was there before."""
    found: list[int] = []

    def hear(number: int, _: Any) -> None:
        found.append(number)

    before = signal.signal(signal.SIGTERM, hear)
    yield found
    signal.signal(signal.SIGTERM, before)
