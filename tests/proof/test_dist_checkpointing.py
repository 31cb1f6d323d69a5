from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.dist_checkpointing import LAYOUTS, load_by, save_by

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_eight_ranks(many_ranks: RankPool, tmp_path: Path, layout: str) -> None:
    """8 ranks save and load, and resharding from and to 8 works."""
    path = str(tmp_path / "ckpt")
    many_ranks.run(8, save_by, path, layout)
    for world in (8, 5, 1):
        many_ranks.run(world, load_by, path, "uneven", 8)
    many_ranks.run(3, save_by, path + "3", layout)
    many_ranks.run(8, load_by, path + "3", "columns", 3)
