"""ckpt-chaos, a referee that a third party wrote, kills saves at each file event that it knows, and resumes them.

``python -m tests.faults.chaos`` makes ``chaos/scores.json``, with the scores of other savers beside ours.
"""

from __future__ import annotations

import json

import pytest

from tests.faults.chaos.names import OURS, SCORES, THEIRS

pytest.importorskip("ckpt_chaos")
pytest.importorskip("tests.faults.chaos.matrix")


def test_the_scores_that_are_shown_are_whole() -> None:
    """The scores that lie beside the program have every program at 1 and 2 ranks, and no point of ours failed."""
    scores = json.loads(SCORES.read_text())["scores"]
    assert sorted({score["program"] for score in scores.values()}) == sorted([*OURS, *THEIRS])
    assert len(scores) == 2 * len({*OURS, *THEIRS})
    for score in scores.values():
        assert sum(score["verdicts"].values()) == score["points"] + 1  # the control run
        assert bool(score["failed"]) == (score["verdicts"].get("PASS", 0) <= score["points"])
        assert not score["drifted"]
        assert score["program"] in THEIRS or not score["failed"]
