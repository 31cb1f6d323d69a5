"""A power cut at any moment of a save leaves the old or the new; after the save has returned, the new."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from tests import backends
from tests.faults.disk_model import PAGE, Directory, Disk, File, policies
from tests.faults.programs import ask, needs_strace

if TYPE_CHECKING:
    from pathlib import Path

FEW = 40  # in the default run
SOME, MANY = 100, 500
SEEDS = 24  # random choices at each moment


def states_of(folder: Path, case: str, count: int, way: str = "foreground", seeds: int = SEEDS) -> list[dict[str, str]]:
    """What was found after so many cuts."""
    found: list[dict[str, str]] = ask("power_cutter", way, folder, case, count, seeds, timeout=400)
    assert len(found) >= count
    return found


def bad(states: list[dict[str, Any]], allowed: set[str]) -> list[dict[str, Any]]:
    """Cuts that left something else, or after whose save, which had returned, the new one is not there."""
    return [s for s in states if s["state"] not in ({"new"} if s["is_last"] == "True" else allowed)]


@needs_strace
@backends.both_in_proof
@pytest.mark.ci
def test_a_power_cut_leaves_old_or_new(disk: Path) -> None:
    """In 40 states of the disk after a power cut in an overwrite, old or new is there bit for bit."""
    states = states_of(disk, "existing", FEW, seeds=2)
    assert bad(states, {"old", "new"}) == []
    assert {state["state"] for state in states} == {"old", "new"}


@needs_strace
@backends.both_in_proof
@pytest.mark.proof
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
@pytest.mark.ci
def test_a_save_without_fsync_is_found_out(disk: Path) -> None:
    """The same states show that a save whose fsyncs do nothing is neither whole nor durable: the model bites."""
    states = states_of(disk, "fresh", 40, "no fsync")
    assert bad(states, {"absent", "new"})
    assert [state for state in states if state["is_last"] == "True" and state["state"] == "absent"]


def test_the_model_of_a_disk(tmp_path: Path) -> None:
    """Of a model disk that was cut, synced bytes and names are there, others as the policy says, renames whole."""
    disk, (nothing, everything) = Disk(), (lambda _: False, lambda _: True)
    disk.create("a", Directory())
    file = File()
    disk.create("a/one", file)
    file.pending.append((0, b"x" * PAGE * 2))
    disk.sync("a/one")
    file.pending.append((PAGE, b"y" * PAGE))
    disk.materialize(tmp_path / "1", nothing, nothing)
    assert not list((tmp_path / "1").iterdir())
    disk.sync("")
    disk.sync("a")
    disk.rename("a/one", "a/two")
    disk.materialize(tmp_path / "2", nothing, nothing)
    assert (tmp_path / "2/a/one").read_bytes() == b"x" * PAGE * 2
    disk.materialize(tmp_path / "3", everything, everything)
    assert (tmp_path / "3/a/two").read_bytes() == b"x" * PAGE + b"y" * PAGE
    for number, (names, data) in enumerate(policies(9, random.Random(1)).values()):
        disk.materialize(tmp_path / f"r{number}", names, data)
        assert len(list((tmp_path / f"r{number}/a").iterdir())) == 1
