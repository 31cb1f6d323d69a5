"""A process that dies while it removes keys leaves the checkpoint with them or without, at any file system call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests import backends
from tests.faults.programs import needs_strace
from tests.faults.removal_kill import CASES, SAMPLED, check, report_kills

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

pytestmark = needs_strace


@CASES
def test_killed_removal_leaves_old_or_new(ranks: Ranks, disk: Path, case: str) -> None:
    """After a kill at any of the calls that change the disk, all keys or all but the removed are there, digests too."""
    report = report_kills(ranks, disk, case, SAMPLED)
    assert len(report["outcomes"]) >= SAMPLED
    check(report, {"old", "new"})
    links = [point["line"] for point in report["points"] if point["call"].startswith("link")]
    linked = {line.split('"')[1].rpartition("/")[2] for line in links}
    assert backends.data_file(2) in linked
    # written anew without removed keys; holds nothing else
    assert not linked & {backends.data_file(0), backends.data_file(1)}
