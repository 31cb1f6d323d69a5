from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.compat.rewritten import STRATEGIES, run_script
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


@pytest.mark.parametrize(("writers", "readers"), [(1, 2), (2, 1), *in_proof((2, 2))])
@pytest.mark.parametrize("function", ["save", "save_in_background"])
def test_strategies_written_for_megatron_run(
    gloo_ranks: RankPool, tmp_path: Path, function: str, writers: int, readers: int
) -> None:
    """Ported by the import rule, a strategy of Megatron's saves, overwrites and loads, by name and itself."""
    gloo_ranks.run(writers, run_script, STRATEGIES, function, str(tmp_path / "c"), "3")
    gloo_ranks.run(readers, run_script, STRATEGIES, "load", str(tmp_path / "c"), "3")
    gloo_ranks.run(writers, run_script, STRATEGIES, function, str(tmp_path / "c"), "5")
    gloo_ranks.run(readers, run_script, STRATEGIES, "load", str(tmp_path / "c"), "5")
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
