"""A rank that dies or stops: all others raise the same error in time, and the checkpoint is the old or the new one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.deaths import NEW, OLD, Scenario, StepJob
from tests.faults.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path


SAVE_STEPS = ("preparing the state dict", "validating", "staging", "writing", "committing")
LOAD_STEPS = ("reading the manifest", "choosing a strategy", "reading the index", "loading shards")


def scenario(world: int, victim: int, operation: str, step: str, how: str, store: str = "file") -> Scenario:
    """One way to lose a rank."""
    return {"world": world, "victim": victim, "operation": operation, "step": step, "how": how, "store": store}


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
EVERY_RANK = [
    scenario(world, victim, operation, step, how, store)
    for operation, step in (("save", "writing"), ("load", "loading shards"))
    for store in ("file", "tcp", "agent")
    for how in ("kill", "stop")
    for world in (2, 3, 4)
    for victim in sorted({0, world // 2, world - 1})
]
#: For the report: each step, in groups of 2 to 4 ranks, of which the first or the last is lost.
EACH_STEP = {
    how: [
        scenario(world, victim, operation, step, how)
        for operation, steps in (("save", SAVE_STEPS), ("load", LOAD_STEPS))
        for step in steps
        for world in (2, 3, 4)
        for victim in (0, world - 1)
    ]
    for how in ("exit", "kill", "stop")
}


def name_of(what: Scenario) -> str:
    """A scenario as the name of a test."""
    return "rank {victim} of {world}: {how} in {operation}, {step}, {store}".format(**what)


def reports_of(scenarios: list[Scenario], folder: Path) -> list[dict[str, Any]]:
    """What came of every scenario, all run by one program."""
    done = run_program("deaths", "step", str(folder), text=json.dumps(scenarios), timeout=max(240, 20 * len(scenarios)))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def check_survivors(what: Scenario, report: dict[str, Any]) -> None:
    """Every other rank ended with the same CommunicationError, which names the lost rank first."""
    survivors = {str(rank) for rank in range(what["world"])} - {str(what["victim"])}
    assert not report["hung"]
    assert survivors == set(report["outcomes"])
    assert len(set(map(tuple, report["outcomes"].values()))) == 1, report
    kind, message = report["outcomes"][survivors.pop()]
    ended = (
        f"did not answer within {StepJob.timeout:g} s" if what["how"] == "stop" else "died or left the process group"
    )
    assert kind == "CommunicationError", message
    assert message.startswith(f"rank {what['victim']} {ended}: a collective of {what['world']} ranks failed in '")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of the scenarios of CI."""
    return reports_of(SCENARIOS, tmp_path_factory.mktemp("deaths"))


@pytest.mark.ci
@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=[name_of(what) for what in SCENARIOS])
def test_lost_rank(reports: list[dict[str, Any]], number: int) -> None:
    """All others raise the same error, which names the lost rank; a save is whole or absent, and the next one works."""
    check_survivors(SCENARIOS[number], reports[number])
    check_checkpoint(SCENARIOS[number], reports[number])


def check_checkpoint(what: Scenario, report: dict[str, Any]) -> None:
    """The checkpoint is the old or the new one, a living main rank leaves nothing else, and the next save works."""
    assert report["state"] in (OLD, NEW)
    assert report["wrong_later"] == []
    if what["victim"] != 0:
        assert report["left"] == ["ckpt"]


@pytest.mark.proof
@pytest.mark.parametrize("backend", ["safetensors"], indirect=True, scope="module")
def test_lost_ranks_of_another_format(tmp_path: Path) -> None:
    """The same holds for (safetensors, 1), in some of the scenarios: what differs is what lies on disk."""
    some = EVERY_STEP[::4]
    for what, report in zip(some, reports_of(some, tmp_path), strict=True):
        check_survivors(what, report)
        check_checkpoint(what, report)


@pytest.mark.proof
@pytest.mark.timeout(1200)
def test_every_step(tmp_path: Path) -> None:
    """In whatever step of a save or load a rank is lost: all others name it, and the checkpoint is the old or new."""
    for what, report in zip(EVERY_STEP, reports_of(EVERY_STEP, tmp_path), strict=True):
        check_survivors(what, report)
        check_checkpoint(what, report)


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_every_lost_rank(tmp_path: Path) -> None:
    """Whichever rank dies or stops, in groups of 2 to 4 ranks, however they have met: all others name it."""
    for what, report in zip(EVERY_RANK, reports_of(EVERY_RANK, tmp_path), strict=True):
        check_survivors(what, report)
