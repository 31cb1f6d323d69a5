"""A disk that is full, has no inodes left, or answers late: an error that says so, and the old or the new."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.disks import SOME, outcomes_of
from tests.faults.programs import ask
from tests.faults.report_sets import outcome_of_full_disk
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path


@backends.both_in_proof
@pytest.mark.parametrize("case", ["existing", *in_proof("fresh")])
@pytest.mark.parametrize("what", ["pages", "inodes"])
def test_a_full_disk_leaves_old_or_new(tmp_path: Path, what: str, case: str) -> None:
    """Wherever in a save the last page or inode is taken: an error with the system's reason and old, or new."""
    found = ask("disk_filler", "foreground", tmp_path, what, case, SOME)
    assert {*outcomes_of(found, case)} == {"old", "new"}, found


def test_what_other_savers_lose_on_a_full_disk(tmp_path: Path) -> None:
    """By the same disks and oracle, torch.save leaves a file that does not load: the oracle bites."""
    found = ask("disk_filler", "torch.save", tmp_path, "pages", "fresh", SOME)
    assert "lost" in [outcome_of_full_disk(each, "fresh", must_say_so=False) for each in found], found
