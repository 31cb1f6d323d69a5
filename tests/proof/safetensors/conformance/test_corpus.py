"""The corpus, and two readers that know the page alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.safetensors.conformance.corpus import CASES, HERE, NODE_READER, Case, find_fault, folder, hostile, needs_node
from tests.safetensors.conformance.fuzz import draw_hostile, write_hostile
from tests.safetensors.conformance.runner import CPU_LIMIT, MEMORY_LIMIT

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder", "hostile"]  # fixtures

PYTHON_READER = [sys.executable, "-m", "tests.safetensors.conformance.independent_reader"]
OUR_READER = [sys.executable, "-W", "ignore", "-m", "tests.safetensors.conformance.ours"]


def _run_conformance(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "tests.safetensors.conformance", *arguments]
    ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=280, check=False)
    rows = ended.stdout.splitlines()
    assert ended.returncode == 0, "\n".join(row for row in rows if " | right | " not in row) + ended.stderr
    return rows


def _measure_ours(directories: list[Path]) -> list[dict[str, Any]]:
    command = [*OUR_READER, "--measure", *map(str, directories)]
    ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=280, check=True)
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_our_reader_answers_in_time_and_memory(folder: Path, tmp_path: Path) -> None:
    """Each entry, and headers of 100 MB, cost us less than 1 s of CPU and 200 MB; every verdict is right."""
    write_hostile(tmp_path, 5, {name for name, _ in draw_hostile(5)})
    hostile = [Case(path.name, "invalid", "") for path in tmp_path.iterdir()]
    cases = [*CASES, *hostile]
    directories = [*(folder / case.name for case in CASES), *(tmp_path / case.name for case in hostile)]
    lines = _measure_ours(directories)
    faults = {case.name: find_fault(case, line) for case, line in zip(cases, lines, strict=True)}
    assert {name: fault for name, fault in faults.items() if fault} == {}
    # once more, what took too long: on a busy machine the same work takes more CPU time
    slow = [place for place, line in zip(directories, lines, strict=True) if line["cpu"] > CPU_LIMIT]
    assert not slow or [line for line in _measure_ours(slow) if line["cpu"] > CPU_LIMIT] == []
    assert [line for line in lines if line["peak"] > MEMORY_LIMIT] == []


@pytest.mark.parametrize("reader", [PYTHON_READER, pytest.param(NODE_READER, marks=needs_node)], ids=["python", "node"])
@pytest.mark.parametrize(
    "kind",
    [  # one process for each of 102 small directories, whose verdicts the default run asks of one process: long
        pytest.param([], marks=pytest.mark.proof, id="corpus"),
        pytest.param(["--hostile"], id="hostile"),
    ],
)
def test_readers_answer_in_time_and_memory(kind: list[str], reader: list[str]) -> None:
    """Each entry, and headers of 100 MB, cost less than 1 s of CPU and 200 MB above the start."""
    rows = _run_conformance(*kind, *reader)
    count = len([*draw_hostile(5)]) if kind else len(CASES)
    assert re.fullmatch(rf"{count} of {count} right; .*", rows[-1])
