from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.manager.replicas import torchft_jobs
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks


@pytest.mark.parametrize("mode", ["async", *in_proof("disabled")])
def test_a_replica_heals_from_another(ranks: Ranks, tmp_path: Path, mode: str) -> None:
    """Under torchft's quorums a lost replica loads, takes over the other's states, and reads on in its own data."""
    first, second = ranks.run(2, torchft_jobs.lost_and_healed, str(tmp_path), mode)
    assert first["alone"] == 1
    assert second["loaded"] == (True, 8, 6)
    step, place = second["healed"]
    assert step >= 9
    assert place == 6
    assert first["step"] == second["step"] == first["counted"] == second["counted"] == step + 5
    assert second["place"] == 6 + 4
    assert first["weights"] == second["weights"]
    assert {"step-4", "step-8", "ft-replicat-0", "ft-replicat-1"} < set(first["steps"])
