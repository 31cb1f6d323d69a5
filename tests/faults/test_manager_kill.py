from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import programs
from tests.manager import jobs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool

_LONG = pytest.mark.long


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "kills", "backend"),
    [
        ("async", 3, "torch_dist"),
        pytest.param("disabled", 20, "torch_dist", marks=_LONG),
        pytest.param("async", 20, "torch_dist", marks=_LONG),
        pytest.param("async_with_pinned_mem", 20, "torch_dist", marks=_LONG),
        ("async", 6, "safetensors"),
    ],
    indirect=["backend"],
    scope="module",
)
@pytest.mark.slow
def test_a_killed_run_goes_on_from_the_newest_committed_step(
    ranks: RankPool, tmp_path: Path, mode: str, kills: int
) -> None:
    """SIGKILL at random moments: the newest committed step is resumed each time, and losses are the unkilled run's."""
    arguments = (str(tmp_path / "run"), mode, str(kills), "11")
    done = programs.run("", *arguments, module="tests.faults.manager_killer", timeout=800)
    assert not done.returncode, done.stderr
    told = json.loads(done.stdout)
    resumed = [line["resumed"] for line in told["seen"] if "resumed" in line]
    assert resumed == [0, *told["newest"]]
    assert told["codes"] == [0] * 4, done.stderr
    losses = {line["step"]: {line["loss"]} for line in told["seen"] if "step" in line}
    for line in told["seen"]:
        losses.get(line.get("step"), set()).add(line.get("loss"))
    assert sorted(losses) == list(range(1, len(losses) + 1))
    expected = ranks.run(4, jobs.unbroken, str(tmp_path / "unkilled"), len(losses), {"interval": 1 << 40})[0]
    assert [losses[step] for step in sorted(losses)] == [{loss} for loss in expected]
    assert all(name.startswith("step-") for name in told["left"])
    assert len(told["left"]) == 3
