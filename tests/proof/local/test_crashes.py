"""A rank that is killed while local checkpoints are saved: what is found afterwards is whole, on every rank."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import programs

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("backend", "step"),
    [  # CI kills at every third change of the disk
        pytest.param("torch_dist", 3, marks=pytest.mark.ci),
        pytest.param("torch_dist", 1, marks=pytest.mark.proof),
        pytest.param("safetensors", 1, marks=pytest.mark.proof),
    ],
    indirect=["backend"],
    scope="module",
)
def test_a_killed_rank_leaves_a_whole_step(tmp_path: Path, step: int) -> None:
    """Wherever in a save a rank is killed, all find the same step, old or new, load its values, and save the next."""
    done = programs.run(
        "",
        str(tmp_path),
        str(step),
        module="tests.local.crashes",
        environment={"SHARDCKPT_IO_THREADS": "1"},
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    reports = json.loads(done.stdout)
    *crashed, survived = reports
    assert survived["crashed"] == ["", ""]
    assert len(crashed) * step > 6
    assert all(report["crashed"][1] is None for report in crashed)
    latest = [[outcome[0] for outcome in report["after"]] for report in reports]
    assert latest[0] == [1, 1]
    assert latest == sorted(latest)
    assert latest[-1] == [2, 2]
    for report in reports:
        for _, is_right, names in report["after"]:
            assert is_right
            assert names == [[3, 0], [3, 1]]
