"""Who is missing when a collective fails, whenever the ranks have entered it, and in whichever group."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.faults.collective_deaths import GROUP_TIMEOUT, Scenario
from tests.faults.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path

_Outcomes = dict[str, tuple[str, list[int], float]]

SCENARIOS = {
    "busy": Scenario(members=[0, 1, 2, 3], delays=[0, 0, 0, 3], victim=2, how="kill"),
    "early": Scenario(members=[0, 1, 2], delays=[3, 0, 0], victim=2, how="stop"),
    "pair": Scenario(members=[1, 3], delays=[0, 0, 0, 0], victim=3, how="kill"),
    "none": Scenario(members=[0, 1, 2], delays=[0, 0, 0], victim=1, how="none"),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, _Outcomes]:
    """What came of every scenario, all run by one program."""
    folder: Path = tmp_path_factory.mktemp("collective-deaths")
    done = run_program("collective_deaths", str(folder), text=json.dumps(list(SCENARIOS.values())))
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(SCENARIOS, json.loads(done.stdout), strict=True))


def _texts(found: _Outcomes) -> set[str]:
    return {text for text, _, _ in found.values()}


def test_a_busy_rank_is_not_taken_for_dead(outcomes: dict[str, _Outcomes]) -> None:
    """Who waits hears of a death at once, who comes later hears the same, and no one but the dead rank is named."""
    found = outcomes["busy"]
    assert set(found) == {"0", "1", "3"}
    (text,) = _texts(found)
    assert text.startswith("rank 2 died or left the process group: a collective of 4 ranks failed in 'meeting'")
    assert all(missing == [2] for _, missing, _ in found.values())
    assert max(seconds for _, _, seconds in found.values()) < GROUP_TIMEOUT


def test_a_rank_that_came_late_and_waits_is_not_taken_for_stopped(outcomes: dict[str, _Outcomes]) -> None:
    """The timeout of the rank that came first ends the wait of all, and only the one that never came is named."""
    found = outcomes["early"]
    assert set(found) == {"0", "1"}
    (text,) = _texts(found)
    assert text.startswith("rank 2 did not answer within 6 s: a collective of 3 ranks failed in 'meeting'")
    assert all(missing == [2] for _, missing, _ in found.values())


def test_in_smaller_groups_ranks_have_the_numbers_of_the_job(outcomes: dict[str, _Outcomes]) -> None:
    """A rank is named by its number in the whole job, with the ranks of its group."""
    ((text, missing, _),) = outcomes["pair"].values()
    assert text.startswith(
        "rank 3 (of the group of ranks 1, 3) died or left the process group: a collective of 2 ranks"
    )
    assert missing == [3]


def test_no_rank_is_blamed_where_all_are_there(outcomes: dict[str, _Outcomes]) -> None:
    """Where a call fails on one rank, all end at once with its reason, and none is said to be missing."""
    found = outcomes["none"]
    assert set(found) == {"0", "1", "2"}
    assert all(missing == [] for _, missing, _ in found.values())
    assert all(
        "a collective of 3 ranks failed in 'meeting', and none of them is missing" in text for text in _texts(found)
    )
    assert max(seconds for _, _, seconds in found.values()) < GROUP_TIMEOUT
