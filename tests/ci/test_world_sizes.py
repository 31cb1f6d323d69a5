"""One program at every world size and without a process group: the same values, the same refusals, the same words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests import backends
from tests.world_sizes import alone, compare, program

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

__all__ = ["alone"]  # fixtures


@backends.both_in_proof
def test_eight_ranks(many_ranks: RankPool, tmp_path: Path, alone: Any) -> None:
    """So do 8 ranks."""
    compare(many_ranks.run(8, program, str(tmp_path)), alone)
