"""Who is missing when a collective fails, whenever the ranks have entered it, and in whichever group."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.distributed.group_failure import DIED, STOPPED
from tests.faults.deaths import CollectiveJob, Scenario
from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path

SCENARIOS = {
    "busy": Scenario(world=4, members=[0, 1, 2, 3], delays=[0, 0, 0, 3], victim=2, how="kill"),
    "early": Scenario(world=3, members=[0, 1, 2], delays=[3, 0, 0], victim=2, how="stop"),
    "pair": Scenario(world=4, members=[1, 3], delays=[0, 0, 0, 0], victim=3, how="kill"),
    "none": Scenario(world=3, members=[0, 1, 2], delays=[0, 0, 0], victim=1, how="none"),
}


def test_processes_find_out_what_simulated_ranks_do(tmp_path: Path) -> None:
    """Real ranks that die, stop, come late, or whose call fails, over gloo: all others say the same, who is missing."""
    reports = ask("deaths", "collective", tmp_path, text=json.dumps(list(SCENARIOS.values())))
    found: dict[str, dict[str, Any]] = dict(zip(SCENARIOS, reports, strict=True))
    expected: dict[str, tuple[set[str], str, list[int]]] = {
        "busy": ({"0", "1", "3"}, "rank 2" + DIED.format(4), [2]),
        "early": ({"0", "1"}, "rank 2" + STOPPED.format(CollectiveJob.timeout, 3), [2]),
        "pair": ({"1"}, "rank 3 (of the group of ranks 1, 3)" + DIED.format(2), [3]),
        "none": ({"0", "1", "2"}, "a collective of 3 ranks failed in 'meeting', and none of them is missing", []),
    }
    for name, (ranks, text, missing) in expected.items():
        outcomes = found[name]["outcomes"]
        assert set(outcomes) == ranks, name
        assert all(kind == "CommunicationError" and said.startswith(text) for kind, said in outcomes.values()), outcomes
        assert all(ranks == missing for ranks in found[name]["missing"].values()), found[name]
