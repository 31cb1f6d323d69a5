"""What the tests of io errors share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.faults.injector import LIES
from tests.faults.programs import ask

if TYPE_CHECKING:
    from pathlib import Path


SOME = 24  # in CI


#: The training's own part of a save by a process is smaller: that process writes.
LEAST_FAULTS = {"process": 100, "foreground": 300, "thread": 300, "request": 300}


#: Calls that change nothing.
QUESTIONS = ("newfstatat", "fstat", "statx", "stat", "lstat", "readlink", "access", "faccessat2", "lseek", "ioctl")


def endings_of(folder: Path, case: str, count: int, way: str = "foreground") -> list[dict[str, Any]]:
    """What the injector program found."""
    report = ask("injector", way, folder, case, count, timeout=1400)
    assert len(report["endings"]) == min(count, report["faults"])
    assert report["faults"] >= LEAST_FAULTS[way]
    return report["endings"]


def is_kept(ending: dict[str, Any], before: str) -> bool:
    """Whether what a load finds agrees with how the save ended."""
    lies = ending["fault"] in LIES
    if ending["ended"] == "saved":
        if ending["call"].startswith(("fsync", "fdatasync")) and ending["fault"] != "EINTR":
            return False  # what may not be durable was called saved
        # what a lying disk did not store, no save can know: the digests must find it
        return ending["state"] == "new" or (lies and ending["state"].startswith("CorruptCheckpointError: "))
    if not ending["ended"].startswith("refused: "):
        return False
    if ending["state"] == "new":
        return "is the new checkpoint" in ending["ended"]
    # what only asked may be answered by a guess that fails later, by another error
    is_named = ending["fault"] in ending["ended"] or lies or ending["call"] in QUESTIONS
    return ending["state"] == before and is_named


def bad(endings: list[dict[str, Any]], before: str) -> list[dict[str, Any]]:
    """Faults that strace did not make, that a load contradicts, or that were in the way of the next save."""
    return [e for e in endings if not e["injected"] or not is_kept(e, before) or e["later"] or e["beside"]]
