"""The versions of modules come back, so that code that upgrades older state does not run on state of today."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.adapters.versions import resume_sharded

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_modules_below_fsdp1_have_them(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP1, which torch's own functions load, is given the versions under the names of its wrappers."""
    for number in (2, 1):
        ranks.run(number, resume_sharded, "fsdp1", tmp_path / "c")
