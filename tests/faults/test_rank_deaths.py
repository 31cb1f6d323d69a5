"""A rank that dies or stops: the others raise within the group's timeout plus 2 s, and the checkpoint is old or new."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.deaths import NEW, OLD, Scenario
from tests.faults.programs import run_program

SAVE_STEPS = ("preparing the state dict", "validating", "staging", "writing", "committing")
LOAD_STEPS = ("reading the manifest", "choosing a strategy", "reading the index", "loading shards")


def scenario(world: int, victim: int, operation: str, step: str, how: str) -> Scenario:
    """One way to lose a rank."""
    return {"world": world, "victim": victim, "operation": operation, "step": step, "how": how}


SCENARIOS = [
    *(scenario(3, 1, "save", step, "exit") for step in SAVE_STEPS),
    *(scenario(3, 0, "save", step, "kill") for step in SAVE_STEPS),
    *(scenario(3, 2, "load", step, "exit") for step in LOAD_STEPS),
    scenario(2, 1, "save", "writing", "kill"),
    scenario(4, 3, "save", "writing", "kill"),
    scenario(4, 0, "load", "loading shards", "kill"),
    scenario(3, 1, "save", "writing", "stop"),
    scenario(2, 0, "load", "reading the manifest", "stop"),
]


def name_of(what: Scenario) -> str:
    """A scenario as the name of a test."""
    return "rank {victim} of {world}: {how} in {operation}, {step}".format(**what)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of every scenario, all run by one program."""
    done = run_program("deaths", str(tmp_path_factory.mktemp("deaths")), text=json.dumps(SCENARIOS))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[name_of(what) for what in SCENARIOS])
def test_lost_rank(reports: list[dict[str, Any]], number: int) -> None:
    """Every other rank ends with a CommunicationError that names the step and the group's size."""
    what, report = SCENARIOS[number], reports[number]
    survivors = {str(rank) for rank in range(what["world"])} - {str(what["victim"])}
    assert not report["hung"]
    assert survivors == set(report["outcomes"])
    for rank, (kind, message) in report["outcomes"].items():
        assert kind == "CommunicationError", message
        assert f"rank {rank}, in '" in message
        assert f"a collective of {what['world']} ranks failed: another rank died, or did not answer" in message


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[name_of(what) for what in SCENARIOS])
def test_checkpoint_after_a_lost_rank(reports: list[dict[str, Any]], number: int) -> None:
    """The checkpoint is the old or the new one, a living main rank leaves nothing else, and the next save works."""
    what, report = SCENARIOS[number], reports[number]
    assert report["state"] in (OLD, NEW)
    assert report["wrong_later"] == []
    if what["victim"] != 0:
        assert report["left"] == ["ckpt"]
