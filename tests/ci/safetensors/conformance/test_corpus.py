"""The corpus, and two readers that know the page alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.safetensors.conformance.corpus import CASES, HERE, NODE, NODE_READER, find_fault, folder, hostile, needs_node
from tests.safetensors.conformance.draft import INDEX
from tests.safetensors.conformance.independent_reader import read_checkpoint
from tests.safetensors.conformance.protocol import describe

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder", "hostile"]  # fixtures


def _ask_node(directories: list[Path], **environment: str) -> list[dict[str, object]]:
    ended = subprocess.run(
        [*NODE_READER, *map(str, directories)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )
    assert not ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_the_independent_reader_needs_numpy_and_json_alone() -> None:
    """Neither it nor what it imports uses shardckpt, torch or safetensors."""
    code = "import sys, tests.safetensors.conformance.independent_reader; print(*sys.modules)"
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parents[2], capture_output=True, text=True, check=True
    )
    packages = {name.split(".")[0] for name in printed.stdout.split()}
    assert "numpy" in packages
    assert not packages & {"shardckpt", "torch", "safetensors", "pydantic", "shardckpt_safetensors"}


@needs_node
@pytest.mark.parametrize(
    "environment",
    [pytest.param({}, id="zlib"), pytest.param({"SLOW_CRC32": "1"}, id="table", marks=pytest.mark.proof)],
)
def test_the_node_reader_is_right(environment: dict[str, str], folder: Path) -> None:
    """The reader in JavaScript gives all verdicts, with the crc32 of node's zlib and with its own."""
    lines = _ask_node([folder / case.name for case in CASES], **environment)
    faults = {case.name: find_fault(case, line) for case, line in zip(CASES, lines, strict=True)}
    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_the_readers_refuse_hostile_headers(hostile: Path) -> None:
    """Headers of less than 1 MB are refused by both readers; a test of CI has the others."""
    directories = [path for path in sorted(hostile.iterdir()) if (path / INDEX).stat().st_size < 1_000_000]
    lines = [describe(read_checkpoint, str(path)) for path in directories]
    lines += _ask_node(directories) if NODE else []
    assert len(directories) >= 15
    assert {line["verdict"] for line in lines} == {"invalid"}


def test_the_runner_says_which_verdicts_are_wrong(tmp_path: Path) -> None:
    """A command that calls everything valid is right of no invalid entry, and ends with status 1."""
    script = tmp_path / "reader.py"
    script.write_text("""print('{"verdict": "valid", "tensors": {}, "objects": {}}')\n""")
    for name, expected in (("no_tensors", 0), ("hole", 1)):
        command = [sys.executable, "-m", "tests.safetensors.conformance", "--entry", name, sys.executable, str(script)]
        ended = subprocess.run(command, cwd=HERE.parents[2], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == expected, ended.stderr
        assert f"{1 - expected} of 1 right" in ended.stdout
