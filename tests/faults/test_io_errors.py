"""A file system call that fails or lies once in a save is an error, or made good: old or new, no silent loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests import backends
from tests.faults.injector import LIES
from tests.faults.programs import ask, needs_strace

if TYPE_CHECKING:
    from pathlib import Path

SOME = 24  # in CI
ALL = 100_000
#: The training's own part of a save by a process is smaller: that process writes.
LEAST_FAULTS = {"process": 100, "foreground": 300, "thread": 300, "request": 300}
#: Calls that change nothing.
_QUESTIONS = ("newfstatat", "fstat", "statx", "stat", "lstat", "readlink", "access", "faccessat2", "lseek", "ioctl")

pytestmark = [needs_strace, pytest.mark.timeout(1500)]


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
    is_named = ending["fault"] in ending["ended"] or lies or ending["call"] in _QUESTIONS
    return ending["state"] == before and is_named


def bad(endings: list[dict[str, Any]], before: str) -> list[dict[str, Any]]:
    """Faults that strace did not make, that a load contradicts, or that were in the way of the next save."""
    return [e for e in endings if not e["injected"] or not is_kept(e, before) or e["later"] or e["beside"]]


@backends.both
@pytest.mark.proof
@pytest.mark.parametrize(("case", "before"), [("fresh", "absent"), ("existing", "old")])
def test_every_call_fails_once(disk: Path, case: str, before: str) -> None:
    """After an error or a lie of any call of a first save or an overwrite, old or new is there, or its damage found.

    Each call has five errors, writes have three lies.
    """
    endings = endings_of(disk, case, ALL)
    assert bad(endings, before) == []
    assert {"new", before} <= {ending["state"] for ending in endings}


@pytest.mark.parametrize(
    ("backend", "case", "before"),
    [  # the other pairs are among those of every call
        ("torch_dist", "existing", "old"),
        pytest.param("safetensors", "fresh", "absent", marks=pytest.mark.proof),
    ],
    indirect=["backend"],
    scope="module",
)
@pytest.mark.ci
def test_calls_that_change_the_disk_fail_once(disk: Path, case: str, before: str) -> None:
    """The same holds for a sample of faults, with each call that changes the disk among them."""
    assert bad(endings_of(disk, case, SOME), before) == []


@backends.both_in_proof
@pytest.mark.proof
@pytest.mark.parametrize(
    "way",
    [pytest.param("request", marks=pytest.mark.proof), "thread", pytest.param("process", marks=pytest.mark.proof)],
)
def test_calls_of_a_background_save_fail_once(disk: Path, way: str) -> None:
    """An error of a call of a background save is raised where it is finalized, and leaves the old."""
    endings = endings_of(disk, "existing", SOME, way)
    assert bad(endings, "old") == []
    assert any(ending["ended"] != "saved" for ending in endings)
