from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardckpt.cli import main
from tests.cli.convert import COMMAND, assert_resumed, finish, prepare, start
from tests.maintenance.resumption import MIB, assert_same_files

if TYPE_CHECKING:
    from pathlib import Path


def start_interpreter(folder: Path, to: str, moment: str = "") -> subprocess.Popen[str]:
    """The same in a new interpreter."""
    command = [sys.executable, "-c", COMMAND, moment, str(folder / "old"), str(folder / "new"), "--to", to]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("to", "moments"),
    [
        pytest.param(to, ["write", "proof"], marks=pytest.mark.ci if to == "hf" else pytest.mark.proof)
        for to in ("safetensors", "torch_dist", "ep", "hf", "torch")
    ],
)
def test_a_killed_command_goes_on_in_a_fresh_process(tmp_path: Path, to: str, moments: list[str]) -> None:
    """Killed while it writes, and again while it proves what it wrote, the command goes on each time, to the same."""
    expected = prepare(tmp_path, to)
    begin = start_interpreter if to == "safetensors" else start  # the others as forks of one: importing takes longest
    for moment in moments:
        process = begin(tmp_path, to, moment)
        assert (process.communicate(timeout=120)[0], process.returncode) == ("", -signal.SIGKILL)
        assert not (tmp_path / "new").exists()
    report = finish(begin(tmp_path, to))
    assert report["resumed"] > 8 * MIB  # all was written
    assert_resumed(tmp_path, expected, report)


_COMMITS = {("safetensors", "rename"), ("hf", "proven"), ("torch", "renamed")}


@pytest.mark.parametrize(
    ("to", "moment"),
    [  # each target, a directory or a file, and each moment; all of the product is long
        pytest.param(to, moment, marks=pytest.mark.ci if (to, moment) in _COMMITS else pytest.mark.proof)
        for to in ("safetensors", "hf", "torch")
        for moment in ("proven", "rename", "renamed")
    ],
)
def test_a_kill_at_the_commit(tmp_path: Path, to: str, moment: str) -> None:
    """Killed at the commit, DST is absent and the next run makes it, or DST is whole, and the next run refuses it."""
    expected = prepare(tmp_path, to)
    process = start(tmp_path, to, moment)
    assert (process.communicate(timeout=120)[0], process.returncode) == ("", -signal.SIGKILL)
    assert (tmp_path / "new").exists() == (moment == "renamed")
    if moment == "renamed":
        assert_same_files(tmp_path / "whole", tmp_path / "new")
        again = start(tmp_path, to)
        assert "new" in again.communicate(timeout=120)[1]
        assert again.returncode == 2
        assert main(["prune", str(tmp_path)]) == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "whole"]
    else:
        assert_resumed(tmp_path, expected, finish(start(tmp_path, to)))
