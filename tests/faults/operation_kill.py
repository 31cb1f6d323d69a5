"""What the tests of operation kill share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path


SOME, MANY = 10, 40


RANKS = ("rank 0 of 2", "rank 1 of 2")


def outcomes_of(scenario: str, folder: Path, case: str, count: int) -> list[dict[str, Any]]:
    """What the driver of kills found."""
    found: list[dict[str, Any]] = ask("killer", scenario, folder, case, count, timeout=800)["outcomes"]
    assert found
    return found
