"""Files that were changed at random: what opens them refuses them, or loads them, within bounds, and does no more."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import backends
from tests.faults.programs import run_program

if TYPE_CHECKING:
    from pathlib import Path


def verdicts_of(folder: Path, count: int) -> list[str]:
    """What the fuzzer said of so many mutants of each file."""
    done = run_program("fuzzer", str(folder), str(count))
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[str] = json.loads(done.stdout)
    return found


@backends.both_in_proof
@pytest.mark.ci
@pytest.mark.parametrize("count", [40, pytest.param(300, marks=pytest.mark.proof)])
def test_mutants_of_every_file(tmp_path: Path, count: int) -> None:
    """Mutants of each file, with and without digests, are errors of the family, or load: no crash, time or memory."""
    found = verdicts_of(tmp_path, count)
    assert [verdict for verdict in found if verdict not in ("refused", "loaded")] == []
    assert found.count("refused") > len(found) // 2
