"""A power cut at any moment of a save leaves the old or the new; after the save has returned, the new."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import backends
from tests.faults.power_cuts import bad, states_of
from tests.faults.programs import needs_strace

if TYPE_CHECKING:
    from pathlib import Path

FEW = 40  # in the default run


@needs_strace
@backends.both_in_proof
def test_a_power_cut_leaves_old_or_new(disk: Path) -> None:
    """In 40 states of the disk after a power cut in an overwrite, old or new is there bit for bit."""
    states = states_of(disk, "existing", FEW, seeds=2)
    assert bad(states, {"old", "new"}) == []
    assert {state["state"] for state in states} == {"old", "new"}


@needs_strace
def test_a_save_without_fsync_is_found_out(disk: Path) -> None:
    """The same states show that a save whose fsyncs do nothing is neither whole nor durable: the model bites."""
    states = states_of(disk, "fresh", 40, "no fsync")
    assert bad(states, {"absent", "new"})
    assert [state for state in states if state["is_last"] == "True" and state["state"] == "absent"]
