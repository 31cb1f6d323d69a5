"""A rank that dies or stops: all others raise the same error in time, and the checkpoint is the old or the new one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.faults.deaths import NEW, OLD, Scenario, StepJob
from tests.faults.programs import ask

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


def check_checkpoint(what: Scenario, report: dict[str, Any]) -> None:
    """The checkpoint is the old or the new one, a living main rank leaves nothing else, and the next save works."""
    assert report["state"] in (OLD, NEW)
    assert report["wrong_later"] == []
    if what["victim"] != 0:
        assert report["left"] == ["ckpt"]


def find_fault(what: Scenario, report: dict[str, Any]) -> str:
    """What does not hold of a scenario; ``""`` for nothing."""
    try:
        check_survivors(what, report)
        check_checkpoint(what, report)
    except AssertionError as exc:
        return f"{exc}: {report}"
    return ""


_PROOF = [pytest.mark.proof, pytest.mark.timeout(3600)]


@pytest.mark.ci
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
