"""A power cut at any moment of a save leaves the old or the new; after the save has returned, the new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.power_cuts import SEEDS, bad, states_of
from tests.faults.programs import needs_strace
from tests.faults.report_sets import OF_ONE_FORMAT, OPERATIONS, UNSYNCED

if TYPE_CHECKING:
    from pathlib import Path

SOME, MANY = 100, 500


@needs_strace
@backends.both_in_proof
@pytest.mark.timeout(450)
@pytest.mark.parametrize(("count", "seeds"), [(SOME, 4), pytest.param(MANY, SEEDS, marks=pytest.mark.proof)])
@pytest.mark.parametrize(
    ("case", "allowed", "way"),
    [
        ("fresh", {"absent", "new"}, "foreground"),
        ("existing", {"old", "new"}, "foreground"),
        pytest.param("existing", {"old", "new"}, "thread", marks=pytest.mark.proof),
        ("existing", {"old", "new"}, "process"),
        ("existing, no exchange", {"old", "new", "set aside"}, "foreground"),
    ],
    ids=["fresh", "existing", "in a thread", "by a process", "no exchange"],
)
def test_power_cuts_at_every_call(disk: Path, case: str, allowed: set[str], way: str, count: int, seeds: int) -> None:
    """The same holds in many states, after every call of a save; for a first save, nothing or the new is there."""
    states = states_of(disk, case, count, way, seeds)
    assert bad(states, allowed) == []
    assert {state["state"] for state in states} >= {"new", *(allowed & {"old", "absent"})}


@needs_strace
@backends.both
@pytest.mark.parametrize("operation", [each for each in OPERATIONS if each not in UNSYNCED])
def test_power_cuts_of_an_operation(disk: Path, operation: str, backend: backends.Backend) -> None:
    """The same holds for whatever changes a checkpoint, a step or what is noted of one."""
    if OF_ONE_FORMAT.get(operation, backend.name) != backend.name:
        pytest.skip("one format shows it")
    states = states_of(disk, "existing", SOME, operation, 8)  # a mark is ten calls
    assert bad(states, {"old", "new"}) == []
    assert {state["state"] for state in states} == {"old", "new"}
