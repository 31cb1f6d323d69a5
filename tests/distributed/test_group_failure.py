"""Who is missing when a collective fails, whenever the ranks have entered it, and in whichever group."""

from __future__ import annotations

import datetime as dt
import json
import time
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from shardckpt.distributed.comm import Comm
from shardckpt.distributed.group_failure import Diagnosis, GroupFailure
from tests.faults.collective_deaths import GROUP_TIMEOUT, Scenario
from tests.faults.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

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
    report = done.stdout.splitlines()[-1]  # after what gloo itself prints in some builds of torch
    return dict(zip(SCENARIOS, json.loads(report), strict=True))


def _texts(found: _Outcomes) -> set[str]:
    return {text for text, _, _ in found.values()}


@pytest.mark.ci
def test_a_busy_rank_is_not_taken_for_dead(outcomes: dict[str, _Outcomes]) -> None:
    """Who waits hears of a death at once, who comes later hears the same, and no one but the dead rank is named."""
    found = outcomes["busy"]
    assert set(found) == {"0", "1", "3"}
    (text,) = _texts(found)
    assert text.startswith("rank 2 died or left the process group: a collective of 4 ranks failed in 'meeting'")
    assert all(missing == [2] for _, missing, _ in found.values())
    assert max(seconds for _, _, seconds in found.values()) < GROUP_TIMEOUT


@pytest.mark.ci
def test_a_rank_that_came_late_and_waits_is_not_taken_for_stopped(outcomes: dict[str, _Outcomes]) -> None:
    """The timeout of the rank that came first ends the wait of all, and only the one that never came is named."""
    found = outcomes["early"]
    assert set(found) == {"0", "1"}
    (text,) = _texts(found)
    assert text.startswith("rank 2 did not answer within 6 s: a collective of 3 ranks failed in 'meeting'")
    assert all(missing == [2] for _, missing, _ in found.values())


@pytest.mark.ci
def test_in_smaller_groups_ranks_have_the_numbers_of_the_job(outcomes: dict[str, _Outcomes]) -> None:
    """A rank is named by its number in the whole job, with the ranks of its group."""
    ((text, missing, _),) = outcomes["pair"].values()
    assert text.startswith(
        "rank 3 (of the group of ranks 1, 3) died or left the process group: a collective of 2 ranks"
    )
    assert missing == [3]


@pytest.mark.ci
def test_no_rank_is_blamed_where_all_are_there(outcomes: dict[str, _Outcomes]) -> None:
    """Where a call fails on one rank, all end at once with its reason, and none is said to be missing."""
    found = outcomes["none"]
    assert set(found) == {"0", "1", "2"}
    assert all(missing == [] for _, missing, _ in found.values())
    assert all(
        "a collective of 3 ranks failed in 'meeting', and none of them is missing" in text for text in _texts(found)
    )
    assert max(seconds for _, _, seconds in found.values()) < GROUP_TIMEOUT


def _twice(folder: str) -> list[object]:
    """What a group is told of the failure of an earlier one that had met in the same store."""
    found: list[object] = []
    store = dist.FileStore(f"{folder}/store", 1)
    for _ in range(2):
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=dt.timedelta(seconds=8))
        comm = Comm()
        failure = GroupFailure(dist.group.WORLD)
        found.append(failure.is_announced())
        found.append(failure.abandon(Diagnosis(f"failure {len(found)}", (3,))).text)
        comm.sync_errors()
    return found


def test_what_became_of_an_earlier_group_is_not_told_of_the_next(ranks: RankPool, tmp_path: Path) -> None:
    """A job that makes its groups anew, with the store that it has, hears of failures from then on alone."""
    assert ranks.run(1, _twice, str(tmp_path)) == [[False, "failure 1", False, "failure 3"]]


def _answer_long_ago(folder: str) -> list[list[int]]:
    """Which ranks have not answered, where rank 1 answered now, and where it did so before the failure."""
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=dt.timedelta(seconds=8))
    failure = GroupFailure(dist.group.WORLD)
    failure._others = [1]
    found = []
    for age in (0.0, 60.0):
        failure._alive.set("1", str(time.time() - age).encode())
        found.append(failure._find_silent_ranks())
    return found


def test_an_answer_to_an_earlier_failure_is_none(ranks: RankPool, tmp_path: Path) -> None:
    """A rank that was alive when another failure was looked into, and does not answer now, is silent."""
    assert ranks.run(1, _answer_long_ago, str(tmp_path)) == [[[], [1]]]
