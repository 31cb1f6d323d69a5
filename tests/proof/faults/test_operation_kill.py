"""Whatever is killed, at any file system call, leaves the old or the new: not only a save in the foreground."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.kill import bad
from tests.faults.operation_kill import MANY, RANKS, outcomes_of
from tests.faults.programs import needs_strace

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_strace


@backends.both
@pytest.mark.timeout(900)
@pytest.mark.parametrize("operation", [*RANKS, "rank 0 of 4", "rank 3 of 4"])
def test_a_killed_rank_leaves_old_or_new(disk: Path, operation: str) -> None:
    """The same holds for more calls of each rank of 2, and of 4."""
    assert bad(outcomes_of(operation, disk, "existing", MANY), {"old", "new"}) == []


def test_the_oracle_finds_what_other_savers_lose(disk: Path) -> None:
    """By the same kills and oracle, plain DCP and torch.save over one path lose both: the oracle bites."""
    for saver in ("dcp", "torch.save"):
        (disk / saver).mkdir()
        outcomes = outcomes_of(saver, disk / saver, "existing", MANY)
        assert any(found["state"].startswith("refused: ") for found in outcomes)
