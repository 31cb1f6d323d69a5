"""A file system call that fails or lies once in a save is an error, or made good: old or new, no silent loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.io_errors import SOME, bad, endings_of
from tests.faults.programs import ask, needs_strace
from tests.faults.report_sets import OF_ONE_FORMAT, OPERATIONS, outcome_of_fault

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [needs_strace, pytest.mark.timeout(1500)]

ALL = 100_000


@backends.both
@pytest.mark.parametrize(("case", "before"), [("fresh", "absent"), ("existing", "old")])
def test_every_call_fails_once(disk: Path, case: str, before: str) -> None:
    """After an error or a lie of any call of a first save or an overwrite, old or new is there, or its damage found.

    Each call has five errors, writes have three lies.
    """
    endings = endings_of(disk, case, ALL)
    assert bad(endings, before) == []
    assert {"new", before} <= {ending["state"] for ending in endings}


@backends.both_in_proof
@pytest.mark.parametrize(
    "way",
    [pytest.param("request", marks=pytest.mark.proof), "thread", pytest.param("process", marks=pytest.mark.proof)],
)
def test_calls_of_a_background_save_fail_once(disk: Path, way: str) -> None:
    """An error of a call of a background save is raised where it is finalized, and leaves the old."""
    endings = endings_of(disk, "existing", SOME, way)
    assert bad(endings, "old") == []
    assert any(ending["ended"] != "saved" for ending in endings)


@backends.both
@pytest.mark.parametrize("operation", OPERATIONS)
def test_calls_of_an_operation_fail_once(disk: Path, operation: str, backend: backends.Backend) -> None:
    """The same holds for whatever changes a checkpoint, a step or what is noted of one; it can be done again."""
    if OF_ONE_FORMAT.get(operation, backend.name) != backend.name:
        pytest.skip("one format shows it")
    endings = ask("injector", operation, disk, "existing", SOME, timeout=600)["endings"]
    outcomes = [outcome_of_fault(ending, "existing") for ending in endings]
    assert {"old", "new"} <= {*outcomes} <= {"old", "new", "damage found", "missed"}, endings
