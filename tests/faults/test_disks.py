"""A disk that is full, has no inodes left, or answers late: an error that says so, and the old or the new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests import backends
from tests.faults.deaths import StepJob
from tests.faults.programs import ask, needs_strace
from tests.faults.report_sets import outcome_of_full_disk, outcome_of_slow_disk
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

SOME = 12  # sizes of the disk; the report has all


def _outcomes(found: list[dict[str, Any]], case: str) -> list[str]:
    return [outcome_of_full_disk(each, case) for each in found]


@backends.both_in_proof
@pytest.mark.ci
@pytest.mark.parametrize("case", ["existing", *in_proof("fresh")])
@pytest.mark.parametrize("what", ["pages", "inodes"])
def test_a_full_disk_leaves_old_or_new(tmp_path: Path, what: str, case: str) -> None:
    """Wherever in a save the last page or inode is taken: an error with the system's reason and old, or new."""
    found = ask("disk_filler", "foreground", tmp_path, what, case, SOME)
    assert {*_outcomes(found, case)} == {"old", "new"}, found


@backends.both_in_proof
@pytest.mark.proof
@pytest.mark.parametrize("way", ["thread", "process"])
def test_a_full_disk_of_a_save_behind_the_training(tmp_path: Path, way: str) -> None:
    """The same holds where a thread or a process writes: the training gets the error when it finalizes the save."""
    found = ask("disk_filler", way, tmp_path, "pages", "existing", SOME)
    assert {*_outcomes(found, "existing")} == {"old", "new"}, found


@pytest.mark.ci
def test_what_other_savers_lose_on_a_full_disk(tmp_path: Path) -> None:
    """By the same disks and oracle, torch.save leaves a file that does not load: the oracle bites."""
    found = ask("disk_filler", "torch.save", tmp_path, "pages", "fresh", SOME)
    assert "lost" in [outcome_of_full_disk(each, "fresh", must_say_so=False) for each in found], found


@needs_strace
@pytest.mark.proof
def test_a_disk_that_answers_late(tmp_path: Path) -> None:
    """A call that takes longer than the group's timeout: all others name its rank in time; a shorter fails none."""
    for seconds, outcome in ((2 * StepJob.timeout, "named"), (StepJob.timeout / 3, "saved")):
        folder = tmp_path / outcome
        folder.mkdir()
        found = ask("slow_disk", 1, 2, seconds, folder, "existing", 2)
        assert [outcome_of_slow_disk(each, 1, 2, seconds) for each in found] == [outcome] * 2, found
