"""The report is what its rows say, and its rows are what the promises need."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.faults.report import Row, write_report
from tests.faults.report_sets import (
    STOCK,
    list_sets,
    outcome_of_cut,
    outcome_of_damage,
    outcome_of_fault,
    outcome_of_full_disk,
    outcome_of_kill,
    outcome_of_local,
    outcome_of_request,
    outcome_of_slow_disk,
    outcome_of_upload,
)
from tests.tables import table

HERE = Path(__file__).parent
#: The least points of a set, as the promises have it.
LEAST = {
    "kills": 1000,
    "io": 500,
    "disks": 400,
    "power": 500,
    "damage": 30_000,
    "ranks": 200,
    "hostile": 5000,
    "chaos": 48,
    "mutations": 40,
}


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """The rows that are kept."""
    return [Row(**each) for each in json.loads((HERE / "report.json").read_text())]


def test_the_page_is_what_the_rows_say(rows: list[Row]) -> None:
    """REPORT.md has every row of report.json, and no figure that is not there."""
    assert (HERE / "REPORT.md").read_text() == write_report(rows, list_sets())


def test_points_and_outcomes(rows: list[Row]) -> None:
    """1,000 kills, 500 errors, 500 power cuts and more were tried on ours, and none of them broke a promise."""
    points: Counter[str] = Counter()
    for row in rows:
        assert row.count_bad() == 0, row
        points[row.threat] += 0 if row.subject in STOCK else row.count_points()
    assert {threat: points[threat] for threat, least in LEAST.items() if points[threat] < least} == {}


def _kill(state: str, *, killed: bool = True, later: str = "") -> dict[str, Any]:
    return {"state": state, "killed": killed, "later": later}


@table(
    ("found", "case", "outcome"),
    [
        (_kill("absent"), "fresh", "old"),
        (_kill("absent"), "existing", "lost"),
        (_kill("set aside"), "existing, no exchange", "old"),
        (_kill("mixed: x"), "existing", "mixed"),
        (_kill("mixed: x", killed=False), "existing", "mixed"),
        (_kill("old", killed=False), "existing", "missed"),
        (_kill("old", later="StorageError: x"), "existing", "other"),
        (_kill("old, but other files are lost"), "existing", "other"),
        (_kill("CorruptCheckpointError: x"), "existing", "lost"),
    ],
)
def test_outcomes_of_kills(found: dict[str, Any], case: str, outcome: str) -> None:
    """A kill is good only where old or new is there, other files too, and the next save succeeds."""
    assert outcome_of_kill(found, case) == outcome


@table(
    ("call", "fault", "ended", "state", "outcome"),
    [
        ("write", "EIO", "saved", "old", "silent"),
        ("write", "EIO", "saved", "CorruptCheckpointError: x", "silent"),
        ("write", "lies: all", "saved", "CorruptCheckpointError: x", "damage found"),
        ("fsync", "EIO", "saved", "new", "silent"),
        ("fsync", "EINTR", "saved", "new", "new"),
        ("write", "EIO", "refused: StorageError: x", "old", "old"),
        ("write", "EIO", "TypeError: x", "old", "other"),
        ("write", "EIO", "hangs", "old", "hang"),
    ],
)
def test_outcomes_of_errors(call: str, fault: str, ended: str, state: str, outcome: str) -> None:
    """A save that succeeded, and is not there or not durable, is silent; only what lied may lead to damage."""
    found = {"injected": True, "call": call, "fault": fault, "ended": ended, "state": state, "later": ""}
    assert outcome_of_fault(found, "existing") == outcome
    if outcome in ("old", "new"):
        assert outcome_of_fault(found | {"later": "StorageError: x"}, "existing") == "other"


def test_outcomes_of_power_cuts() -> None:
    """After the save has returned, only the new one will do."""
    assert outcome_of_cut({"state": "old", "is_last": "False"}, "existing") == "old"
    assert outcome_of_cut({"state": "old", "is_last": "True"}, "existing") == "silent"


@table(
    ("load", "is_named", "verify", "outcome"),
    [
        ("WRONG: w", True, {"f": "x"}, "silent"),
        ("f is damaged", True, {"f": "x"}, "by load and verify"),
        ("something is damaged", False, {"f": "x"}, "not named"),
        ("", False, {"f": "x"}, "by verify"),
        ("", False, {}, "missed"),
        ("ALIEN: KeyError: x", False, {}, "other"),
    ],
)
def test_outcomes_of_damage(load: str, is_named: bool, verify: dict[str, str], outcome: str) -> None:
    """Wrong values are silent, whatever verify says; an error must name the file."""
    found = {"load": load, "is_error_named": is_named, "verify": verify, "is_blamed": bool(verify)}
    assert outcome_of_damage(found) == outcome


def test_outcomes_of_requests() -> None:
    """A save that returned must load; one that failed must have failed on all ranks, and loads nothing, or the old."""
    good, bad = ["", ""], ["StorageError", "x"]
    mixture = ["AssertionError", "a mixture: 1, 2"]

    def outcome(
        errors: list[list[str]], load: list[str], *, killed: int = 0, old: list[str] = bad, overwrites: bool = False
    ) -> str:
        report = {"hung": False, "killed": killed, "fault": "500", "errors": errors, "overwrites": overwrites}
        report |= {"requests": [["PUT", "p", "500"]], "after": {"load": load, "old": old, "second": good}}
        return outcome_of_request(report)

    assert outcome([good, good], good) == "new"
    assert outcome([good, good], bad) == "lost"
    assert outcome([bad, bad], bad) == "old"
    assert outcome([good, bad], good) == "other"
    assert outcome([], bad, killed=2) == "old"
    assert outcome([good, good], mixture, old=mixture) == "mixed"
    assert outcome([good, good], good, old=mixture, overwrites=True) == "new"
    assert outcome([bad, bad], mixture, old=good, overwrites=True) == "old"
    assert outcome([good, good], mixture, old=good, overwrites=True) == "silent"
    assert outcome([], bad, killed=2, overwrites=True) == "lost"
    assert outcome([], mixture, killed=2, old=mixture, overwrites=True) == "mixed"


_FULL = "refused: StorageError: cannot write x: No space left on device (ENOSPC)"


@table(
    ("ended", "state", "later", "outcome"),
    [
        (_FULL, "old", "", "old"),
        ("refused: StorageError: x", "old", "", "other"),
        (_FULL, "absent", "", "lost"),
        (_FULL, "old", "StorageError: x", "other"),
        ("saved", "new", "", "new"),
        ("saved", "old", "", "silent"),
        ("TypeError: x", "old", "", "other"),
        ("hangs", "old", "", "hang"),
    ],
)
def test_outcomes_of_full_disks(ended: str, state: str, later: str, outcome: str) -> None:
    """An error of a full disk has the system's reason and leaves the old; a success is there."""
    found = {"ended": ended, "state": state, "later": later, "beside": []}
    assert outcome_of_full_disk(found, "existing") == outcome


def test_the_others_need_not_say_that_the_disk_is_full() -> None:
    """For comparison any error will do, where what was there before still is."""
    found = {"ended": "refused: RuntimeError: unexpected pos", "state": "old", "later": "", "beside": []}
    assert outcome_of_full_disk(found, "existing", must_say_so=False) == "old"


def test_outcomes_of_slow_disks() -> None:
    """A slow rank is named by all others in time; one that is not too slow makes no error."""

    def outcome(others: list[Any], seconds: float, state: str = "old") -> str:
        told = {"0": others, "1": ["", "", 9.0]}
        found = {"held": True, "told": told, "state": state, "later": "", "beside": []}
        return outcome_of_slow_disk(found, 1, 2, seconds)

    named = "rank 1 did not answer within 3 s: a collective failed"
    assert outcome(["CommunicationError", named, 4.0], 6.0) == "named"
    assert outcome(["CommunicationError", named, 6.0], 6.0) == "late"
    assert outcome(["CommunicationError", "rank 0 did not answer", 4.0], 6.0) == "not named"
    assert outcome(["", "", 1.0], 6.0) == "not named"
    assert outcome(["", "", 1.0], 1.0, "new") == "saved"
    assert outcome(["", "", 1.0], 1.0) == "not named"
    assert outcome(["CommunicationError", named, 4.0], 6.0, "mixed: x") == "wrong checkpoint"


def test_outcomes_of_local_checkpoints_and_uploads() -> None:
    """All ranks must find one whole step; a killed upload is whole or absent, and gives way to the next save."""
    good, rest = ["", ""], [[3, 0], [3, 1]]
    assert outcome_of_local({"after": [[1, True, rest], [1, True, rest]]}) == "old"
    assert outcome_of_local({"after": [[2, True, rest], [1, True, rest]]}) == "mixed"
    assert outcome_of_local({"after": [[2, True, rest], [2, False, rest]]}) == "mixed"
    assert outcome_of_local({"after": [[2, True, rest], None]}) == "hang"
    taken, absent = ["StorageError", "is not empty"], ["IncompleteCheckpointError", "x"]

    def upload(load: list[str], refused: list[str], again: list[str], after: list[str]) -> str:
        return outcome_of_upload({"hung": False, "load": load, "refused": refused, "again": again, "after": after})

    assert upload(good, taken, good, good) == "new"
    assert upload(good, good, good, good) == "other"
    assert upload(absent, taken, good, good) == "old"
    assert upload(absent, taken, taken, absent) == "other"
    assert upload(["AssertionError", "x"], taken, good, good) == "mixed"
