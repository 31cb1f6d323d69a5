"""What the tests of power cuts share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path


SEEDS = 24  # random choices at each moment


def states_of(folder: Path, case: str, count: int, way: str = "foreground", seeds: int = SEEDS) -> list[dict[str, str]]:
    """What was found after so many cuts."""
    found: list[dict[str, str]] = ask("power_cutter", way, folder, case, count, seeds, timeout=400)
    assert len(found) >= count
    return found


def bad(states: list[dict[str, Any]], allowed: set[str]) -> list[dict[str, Any]]:
    """Cuts that left something else, or after whose save, which had returned, the new one is not there."""
    return [s for s in states if s["state"] not in ({"new"} if s["is_last"] == "True" else allowed)]
