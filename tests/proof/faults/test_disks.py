"""A disk that is full, has no inodes left, or answers late: an error that says so, and the old or the new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.deaths import StepJob
from tests.faults.disks import SOME, outcomes_of
from tests.faults.programs import ask, needs_strace
from tests.faults.report_sets import outcome_of_slow_disk

if TYPE_CHECKING:
    from pathlib import Path


@backends.both_in_proof
@pytest.mark.parametrize("way", ["thread", "process"])
def test_a_full_disk_of_a_save_behind_the_training(tmp_path: Path, way: str) -> None:
    """The same holds where a thread or a process writes: the training gets the error when it finalizes the save."""
    found = ask("disk_filler", way, tmp_path, "pages", "existing", SOME)
    assert {*outcomes_of(found, "existing")} == {"old", "new"}, found


@needs_strace
def test_a_disk_that_answers_late(tmp_path: Path) -> None:
    """A call that takes longer than the group's timeout: all others name its rank in time; a shorter fails none."""
    for seconds, outcome in ((2 * StepJob.timeout, "named"), (StepJob.timeout / 3, "saved")):
        folder = tmp_path / outcome
        folder.mkdir()
        found = ask("slow_disk", 1, 2, seconds, folder, "existing", 2)
        assert [outcome_of_slow_disk(each, 1, 2, seconds) for each in found] == [outcome] * 2, found
