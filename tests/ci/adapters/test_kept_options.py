"""Options of groups may keep their live values where torch hands over the state."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tests.adapters.kept_options import resume_sharded

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


def test_flat_optimizers_keep_theirs(ranks: Ranks, tmp_path: Path) -> None:
    """Under FSDP1 each rank keeps the named option and loads the other."""
    assert ranks.run(2, partial(resume_sharded, flat=True), tmp_path / "c") == [[0.25, 0.5]] * 2
