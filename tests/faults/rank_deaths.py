"""What the tests of rank deaths share."""

from __future__ import annotations

from typing import Any

from tests.faults.deaths import NEW, OLD, Scenario, StepJob

SAVE_STEPS = ("preparing the state dict", "validating", "staging", "writing", "committing")
LOAD_STEPS = ("reading the manifest", "choosing a strategy", "reading the index", "reading shards")


def scenario(world: int, victim: int, operation: str, step: str, how: str, store: str = "file") -> Scenario:
    """One way to lose a rank."""
    return {"world": world, "victim": victim, "operation": operation, "step": step, "how": how, "store": store}


EVERY_RANK = [
    scenario(world, victim, operation, step, how, store)
    for operation, step in (("save", "writing"), ("load", "reading shards"))
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
