"""A rank that dies or stops: all others raise the same error in time, and the checkpoint is the old or the new one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.programs import ask
from tests.faults.rank_deaths import EVERY_RANK, LOAD_STEPS, SAVE_STEPS, check_checkpoint, check_survivors, scenario

if TYPE_CHECKING:
    from pathlib import Path

    from tests.faults.deaths import Scenario

#: A rank is killed, a rank stops, and the one is killed that hosts the store.
SCENARIOS = [
    scenario(4, 3, "save", "writing", "kill"),
    scenario(3, 1, "save", "writing", "stop"),
    scenario(3, 0, "save", "committing", "kill", "tcp"),
]

EVERY_STEP = [
    *(scenario(3, 1, "save", step, "exit") for step in SAVE_STEPS),
    *(scenario(3, 0, "save", step, "kill") for step in SAVE_STEPS),
    *(scenario(3, 2, "load", step, "exit") for step in LOAD_STEPS),
    scenario(4, 3, "save", "staging", "kill", "tcp"),
    scenario(2, 0, "load", "reading the manifest", "stop"),
    scenario(3, 0, "save", "validating", "stop", "tcp"),
    scenario(4, 2, "load", "reading the index", "stop", "tcp"),
]


def name_of(what: Scenario) -> str:
    """A scenario as the name of a test."""
    return "rank {victim} of {world}: {how} in {operation}, {step}, {store}".format(**what)


def find_fault(what: Scenario, report: dict[str, Any]) -> str:
    """What does not hold of a scenario; ``""`` for nothing."""
    try:
        check_survivors(what, report)
        check_checkpoint(what, report)
    except AssertionError as exc:
        return f"{exc}: {report}"
    return ""


_PROOF = [pytest.mark.proof, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(
    ("scenarios", "backend"),
    [
        (SCENARIOS, "torch_dist"),
        pytest.param(EVERY_STEP, "torch_dist", marks=_PROOF),
        pytest.param(EVERY_RANK, "torch_dist", marks=_PROOF),
        pytest.param(EVERY_STEP[::4], "safetensors", marks=_PROOF),
    ],
    ids=["three ranks", "every step", "every rank, in every store", "some steps"],
    indirect=["backend"],
    scope="module",
)
def test_lost_rank(tmp_path: Path, scenarios: list[Scenario]) -> None:
    """All others raise the same error, which names the lost rank; a save is whole or absent, and the next one works."""
    reports = ask("deaths", "step", tmp_path, text=json.dumps(scenarios), timeout=max(240, 20 * len(scenarios)))
    found = {name_of(what): find_fault(what, report) for what, report in zip(scenarios, reports, strict=True)}
    assert {name: fault for name, fault in found.items() if fault} == {}
