"""ckpt-chaos, a referee that a third party wrote, kills saves at each file event that it knows, and resumes them.

``python -m tests.faults.chaos`` makes ``chaos/scores.json``, with the scores of other savers beside ours.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.faults.chaos.names import OURS
from tests.faults.programs import run_in_new_interpreter

if TYPE_CHECKING:
    from pathlib import Path
pytest.importorskip("ckpt_chaos")
pytest.importorskip("tests.faults.chaos.matrix")


@pytest.mark.parametrize("program", OURS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_point_passes(tmp_path: Path, program: str, ranks: int) -> None:
    """After a kill at any event, on any rank, the training resumes at the newest whole step, to the same weights."""
    done = run_in_new_interpreter("chaos", program, "--ranks", str(ranks), "-o", str(tmp_path / "scores"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (score,) = json.loads((tmp_path / "scores").read_text())["scores"].values()
    assert score["points"] >= 8
    assert score["verdicts"] == {"PASS": score["points"] + 1}
