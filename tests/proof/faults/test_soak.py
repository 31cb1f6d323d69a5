"""Long use: nothing grows, and jobs that are killed again and again lose no save that had returned."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests import backends
from tests.faults.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path


def report_of(folder: Path, minutes: float, saves: int) -> dict[str, Any]:
    """What the soak found."""
    arguments = ("--minutes", str(minutes), "--saves", str(saves), str(folder))
    done = run_program("soak", *arguments, timeout=minutes * 60 + 300)
    assert done.returncode == 0, (done.stdout[-4000:], done.stderr[-4000:])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check_kills(report: dict[str, Any], least: int) -> None:
    """Every kill left the last save that had returned, or the next; every read was one whole save."""
    assert report["bad"] == []
    assert set(report["kills"]) <= {"old", "new"}
    assert sum(report["kills"].values()) >= least
    assert report["reads"]["whole"] >= least


@backends.both_in_proof
def test_kills_and_readers(tmp_path: Path) -> None:
    """Jobs that are killed for 15 s lose no save that had returned; readers see no mixture, no step back."""
    check_kills(report_of(tmp_path, 0.25, 0), 5)


@backends.both_in_proof
def test_nothing_grows(tmp_path: Path) -> None:
    """200 saves hold no more descriptors, threads and shared memory than 60, and at most 32 MiB more memory."""
    report = report_of(tmp_path, 0, 200)
    assert report["held"][-1]["saves"] == 200
    assert report["grown"] == {}


@pytest.mark.timeout(3 * 3600)
def test_soak(tmp_path: Path) -> None:
    """The same for 30 minutes (SOAK_MINUTES: other ones), and 1,000 saves."""
    report = report_of(tmp_path, float(os.environ.get("SOAK_MINUTES", "30")), 1000)
    check_kills(report, 20)
    assert report["grown"] == {}
