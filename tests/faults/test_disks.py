"""A disk that is full, has no inodes left, or answers late: an error that says so, and the old or the new."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests import backends
from tests.faults.deaths import StepJob
from tests.faults.programs import needs_strace, run_program
from tests.faults.report_sets import outcome_of_full_disk, outcome_of_slow_disk
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

SOME = 12  # sizes of the disk; the report has all


def _run(program: str, *arguments: str) -> list[dict[str, Any]]:
    """What the program has found."""
    done = run_program(program, *arguments, timeout=280)
    for reason in ("mounting is not permitted", "strace did not attach"):
        if done.returncode and reason in done.stderr:
            pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def _outcomes(found: list[dict[str, Any]], case: str) -> list[str]:
    return [outcome_of_full_disk(each, case) for each in found]


@backends.both_in_proof
@pytest.mark.ci
@pytest.mark.parametrize("case", ["existing", *in_proof("fresh")])
@pytest.mark.parametrize("what", ["pages", "inodes"])
def test_a_full_disk_leaves_old_or_new(tmp_path: Path, what: str, case: str) -> None:
    """Wherever in a save the last page or inode is taken: an error with the system's reason and old, or new."""
    found = _run("disk_filler", "foreground", str(tmp_path), what, case, str(SOME))
    assert {*_outcomes(found, case)} == {"old", "new"}, found


@backends.both_in_proof
@pytest.mark.proof
@pytest.mark.parametrize("way", ["thread", "process"])
def test_a_full_disk_of_a_save_behind_the_training(tmp_path: Path, way: str) -> None:
    """The same holds where a thread or a process writes: the training gets the error when it finalizes the save."""
    found = _run("disk_filler", way, str(tmp_path), "pages", "existing", str(SOME))
    assert {*_outcomes(found, "existing")} == {"old", "new"}, found


@pytest.mark.ci
def test_what_other_savers_lose_on_a_full_disk(tmp_path: Path) -> None:
    """By the same disks and oracle, torch.save leaves a file that does not load: the oracle bites."""
    found = _run("disk_filler", "torch.save", str(tmp_path), "pages", "fresh", str(SOME))
    assert "lost" in [outcome_of_full_disk(each, "fresh", must_say_so=False) for each in found], found


@needs_strace
@pytest.mark.proof
def test_a_disk_that_answers_late(tmp_path: Path) -> None:
    """A call that takes longer than the group's timeout: all others name its rank in time; a shorter fails none."""
    for seconds, outcome in ((2 * StepJob.timeout, "named"), (StepJob.timeout / 3, "saved")):
        folder = tmp_path / outcome
        folder.mkdir()
        found = _run("slow_disk", "1", "2", str(seconds), str(folder), "existing", "2")
        assert [outcome_of_slow_disk(each, 1, 2, seconds) for each in found] == [outcome] * 2, found
