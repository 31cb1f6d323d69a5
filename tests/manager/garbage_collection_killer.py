"""Program: kill a garbage collection before each change that it makes, and say what is left.

``python -m tests.manager.garbage_collection_killer local|links|store FOLDER`` prints a line of JSON for each kill. With
``links`` the folder is a local one whose manager keeps links, which lead to the steps before the newest was saved.
torch is imported once; every collection and load is a fork.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.manager.garbage_collection import collect_garbage
from shardckpt.manager.retention import KeepLatest
from tests.faults.forks import fork, wait
from tests.manager import folders

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = (1, 2, 3, 4)
POLICIES = [KeepLatest(2)]
#: Python's own events for the system calls by which a directory changes.
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.symlink"}
#: Of the steps that the policies keep, the third is the best.
LOSSES = (0.1, 0.4, 0.2, 0.3)
CONFIG = {"links": True, "best_metric": "loss", "best_mode": "min"}


def main(kind: str, folder: Path) -> None:
    """Kill the k-th change for every k, until there are no more."""
    torch.set_num_threads(1)
    pristine = folder / "pristine"
    for step, loss in zip(STEPS, LOSSES, strict=True):
        folders.save(pristine, step, config=CONFIG if kind == "links" else None, loss=loss)
    if kind == "links":
        (pristine / "latest").symlink_to("step-3")
        (pristine / "best").symlink_to("step-1")
    assert all(folders.is_intact(pristine / f"step-{step}", step) for step in STEPS)
    number, killed = 0, True
    while killed:
        number += 1
        place = folder / str(number)
        shutil.copytree(pristine, place / "run", symlinks=True)
        report = _one(place, number, kind)
        killed = report["killed"]
        sys.stdout.write(json.dumps(report) + "\n")


def _one(place: Path, number: int, kind: str) -> dict[str, Any]:
    run = place / "run"
    location = f"faulty://{run}" if kind == "store" else str(run)
    victim = (lambda: _die_at(number, location)) if kind != "store" else (lambda: _die_at_store(run, number, location))
    (status,) = wait([fork(victim)], 30).values()
    (place / "faults").unlink(missing_ok=True)
    for rules in run.glob("faults"):
        rules.unlink()
    report = _said(place, lambda: _seen(location)) | {"links": _find_links(run)}
    _said(place, lambda: collect_garbage(folders.steps_of(location), POLICIES))
    after = _said(place, lambda: _seen(location))
    links = _find_links(run)
    names = sorted(folders.names_in(run) - {"journal", *links, *([folders.HOLDS] if kind == "store" else [])})
    killed = status is not None and os.WIFSIGNALED(status)
    return {**report, "killed": killed, "after": names, "intact_after": after["intact"], "links_after": links}


def _find_links(run: Path) -> dict[str, str]:
    """Where the links lead that people see."""
    return {path.name: str(path.readlink()) for path in run.glob("[!.]*") if path.is_symlink()}


def _die_at(number: int, location: str) -> None:
    """Collect garbage, and die before the change of that number."""
    changes = 0

    def on_event(event: str, _: Any) -> None:
        nonlocal changes
        changes += event in CHANGES
        if event in CHANGES and changes == number:  # os.kill is an event, too
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(on_event)
    collect_garbage(folders.steps_of(location), POLICIES)


def _die_at_store(run: Path, number: int, location: str) -> None:
    """The same before that deletion on a store."""
    rules = run / "faults"
    rules.write_text(json.dumps(["delete", number, number, "kill-before"]) + "\n")
    collect_garbage(folders.steps_of(location), POLICIES)


def _seen(location: str) -> dict[str, Any]:
    """Which steps count, which load, and which look like a checkpoint that was damaged."""
    folder = folders.steps_of(location)
    looks = [folder.inspect_step(step) for step in folder.steps()]
    return {
        "counts": [look.step for look in looks if look.is_loadable],
        "damaged": [str(look.error) for look in looks if look.is_damaged],
        "intact": [look.step for look in looks if folders.is_intact(folder.location(look.step), look.step)],
    }


def _said(place: Path, action: Callable[[], Any]) -> Any:
    """What a fork that acts returns."""
    said = place / "said"
    wait([fork(lambda: said.write_text(json.dumps(action())) and None)], 30)
    return json.loads(said.read_text())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
