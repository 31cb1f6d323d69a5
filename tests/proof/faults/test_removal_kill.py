"""A process that dies while it removes keys leaves the checkpoint with them or without, at any file system call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.programs import needs_strace
from tests.faults.removal_kill import CASES, SAMPLED, check, report_kills

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

pytestmark = needs_strace

ALL = 10_000


def test_killed_removal_where_names_cannot_be_exchanged(ranks: Ranks, disk: Path) -> None:
    """Without RENAME_EXCHANGE a kill at any of the same calls may leave one state more, which is named: set aside."""
    report = report_kills(ranks, disk, "ours", SAMPLED, "existing, no exchange")
    assert len(report["outcomes"]) >= SAMPLED
    check(report, {"old", "new", "set aside"})


@CASES
@pytest.mark.parametrize("exchange", [True, False])
def test_killed_at_every_call(ranks: Ranks, disk: Path, case: str, exchange: bool) -> None:
    """The same at every single call; without RENAME_EXCHANGE the one window is named, and renaming ends it."""
    report = report_kills(ranks, disk, case, ALL, "existing" if exchange else "existing, no exchange")
    assert len(report["outcomes"]) == len(report["points"])
    check(report, {"old", "new"} if exchange else {"old", "new", "set aside"})
