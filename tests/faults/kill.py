"""What the tests of kill share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path

SAMPLED = 50


#: What is at the path before a save, and what a kill may leave there.
CASES: list[tuple[str, set[str]]] = [
    ("fresh", {"absent", "new"}),
    ("existing", {"old", "new"}),
    ("existing, no exchange", {"old", "new", "set aside"}),
]


def bad(outcomes: list[dict[str, Any]], allowed: set[str]) -> list[str]:
    """Points whose save was not killed there, left something else, was in the way of the next save, or outlived it."""
    return [
        f"{o['line']}: killed={o['killed']} state={o['state']} later={o['later']} beside={o['beside']}"
        for o in outcomes
        if not o["killed"] or o["state"] not in allowed or o["later"] or o["beside"]
    ]


def kill(scenario: str, folder: Path, case: str, count: int, allowed: set[str]) -> dict[str, Any]:
    """Kill at so many calls; every state that is allowed comes, and no other. What the driver found."""
    report: dict[str, Any] = ask("killer", scenario, folder, case, count)
    assert len(report["outcomes"]) == min(count, len(report["points"]))
    found = bad(report["outcomes"], allowed)
    assert not found, found
    states = {outcome["state"] for outcome in report["outcomes"]}
    assert states == allowed, states
    return report
