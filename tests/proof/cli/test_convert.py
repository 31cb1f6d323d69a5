from __future__ import annotations

import os
import random
import shutil
import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.cli.convert import assert_resumed, finish, prepare, start
from tests.maintenance.resumption import assert_same_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("to", ["safetensors", "hf", "torch"])
def test_kills_at_random_moments(tmp_path: Path, to: str) -> None:
    """Killed at 10 random moments, a fresh process goes on with what there is, to the same."""
    expected = prepare(tmp_path, to)
    began = time.monotonic()
    finish(start(tmp_path, to))
    seconds = time.monotonic() - began
    (tmp_path / "new").rename(tmp_path / "probe")
    remove(tmp_path / "probe")
    draw = random.Random(to)
    for _ in range(10):
        process = start(tmp_path, to)
        time.sleep(draw.uniform(0, 1) * seconds)
        os.kill(process.pid, signal.SIGKILL)  # nobody has asked for its end: the number is its own
        process.communicate(timeout=120)
        if (tmp_path / "new").exists():  # it was done before the kill
            assert_same_files(tmp_path / "whole", tmp_path / "new")
            remove(tmp_path / "new")
        lines = [path.read_bytes().count(b"progress") for path in tmp_path.glob(".new.*/.journal")]
        report = finish(start(tmp_path, to))
        assert bool(report["resumed"]) == bool(sum(lines))
        assert_resumed(tmp_path, expected, report)
        remove(tmp_path / "new")


def remove(path: Path) -> None:
    """Remove a file or directory."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()
