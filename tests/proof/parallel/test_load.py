from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tests import backends
from tests.faults.deaths import Scenario
from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path


SCENARIOS = [
    Scenario(world=3, group=3, victim=1, algorithm="gather_rounds", how="kill"),
    Scenario(world=3, group=3, victim=0, algorithm="broadcast", how="kill"),
    Scenario(world=4, group=2, victim=1, algorithm="broadcast", how="kill"),
    Scenario(world=4, group=2, victim=2, algorithm="gather_rounds", how="stop"),
]


@backends.both_in_proof
def test_a_rank_lost_in_the_exchange(tmp_path: Path) -> None:
    """Where a rank dies or stops between two rounds, all others name it within one timeout, in all groups."""
    reports = ask("deaths", "exchange", tmp_path, text=json.dumps(SCENARIOS))
    for scenario, report in zip(SCENARIOS, reports, strict=True):
        assert not report["hung"], scenario
        survivors = {str(rank) for rank in range(scenario["world"])} - {str(scenario["victim"])}
        assert set(report["outcomes"]) == survivors, scenario
        ((kind, message),) = {tuple(outcome) for outcome in report["outcomes"].values()}
        assert kind == "CommunicationError", message
        assert message.startswith(f"rank {scenario['victim']} "), message
