"""A process that dies in a save leaves the old or the new checkpoint, at any file system call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.kill import CASES, SAMPLED, kill
from tests.faults.programs import needs_strace

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_strace

ALL = 10_000


@backends.both
@pytest.mark.parametrize(("case", "allowed"), CASES)
def test_killed_save_with_table_files_leaves_old_or_new(disk: Path, case: str, allowed: set[str]) -> None:
    """The same holds where each file's table of digests is in a file of its own, which is durable before its name."""
    lines = [point["line"] for point in kill("tables", disk, case, 60, allowed)["points"]]
    assert any("fsync" in line and ".digests>" in line for line in lines)


@backends.both
@pytest.mark.parametrize(("case", "allowed"), CASES)
def test_killed_at_every_call(disk: Path, case: str, allowed: set[str]) -> None:
    """The same holds at every single call; without RENAME_EXCHANGE the one window is named, and renaming ends it."""
    assert len(kill("foreground", disk, case, ALL, allowed)["outcomes"]) >= SAMPLED
