from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.background import jobs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@backends.both_in_proof
@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.proof)])
def test_a_dead_worker_is_everyones_error(ranks: Ranks, tmp_path: Path, victim: int) -> None:
    """A killed worker is an error that names its rank on all ranks; nothing is left, and the next save works."""
    messages = ranks.run(2, jobs.worker_dies, str(tmp_path / "c"), victim)
    assert len(set(messages)) == 1
    assert f"rank {victim}" in messages[0]
    assert "signal 9" in messages[0]
