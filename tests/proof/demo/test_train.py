"""The training script that users copy, run by ranks that stay between tests."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.demo.train import read_reports

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.ranks import Ranks


def _losses(reports: Sequence[dict[str, Any]]) -> dict[int, float]:
    return {fields["step"]: fields["loss"] for fields in reports if "loss" in fields}


@pytest.mark.parametrize("options", [(), pytest.param(("--ep", "2"), marks=pytest.mark.proof)])
def test_the_same_ranks_go_on_bit_for_bit(ranks: Ranks, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Two steps, a checkpoint and two more in a new model with other parameters are four steps in one go."""
    once = ranks.run(4, read_reports, tmp_path / "once", "--steps=4", "--interval=9", *options)[0]
    ranks.run(4, read_reports, tmp_path / "twice", "--steps=2", *options)
    resumed = ranks.run(4, read_reports, tmp_path / "twice", "--steps=4", "--seed=1", *options)
    assert resumed[0][0]["loaded"] == 2
    assert _losses(resumed[0]) == {step: loss for step, loss in _losses(once).items() if step > 2}
    assert resumed[0][-1]["state"] == once[-1]["state"]
    assert all(reports == resumed[0] for reports in resumed)


def test_experts_are_trained_alike_however_they_are_split(ranks: Ranks, tmp_path: Path) -> None:
    """From the same parameters, ep 2 x efsdp 2, ep 4 and one process without a group make the same steps."""
    alone = _losses(read_reports(tmp_path / "1", "--steps=3", "--ep=1"))
    for ep in ("2", "4"):
        reports, *_ = ranks.run(4, read_reports, tmp_path / ep, "--steps=3", f"--ep={ep}")
        assert _losses(reports) == pytest.approx(alone, rel=1e-5)


def test_the_command_lines_of_its_docstring_run(tmp_path: Path) -> None:
    """Torchrun trains with 2 ranks, and one process goes on from its checkpoint."""
    script = ["-m", "shardckpt.demo.train", "--dir", str(tmp_path), "--interval", "2", "--steps"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    outputs = [
        subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            check=True,
        ).stdout
        for command in ([*torchrun, *script, "2"], [*script, "4"])
    ]
    assert '{"saved": 2, ' in outputs[0]
    assert '{"loaded": 2, ' in outputs[1]
    assert '{"saved": 4, ' in outputs[1]
