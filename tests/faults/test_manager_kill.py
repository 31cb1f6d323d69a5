from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests import programs
from tests.manager import jobs
from tests.remote.servers import BUCKET, moto_server, variables

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_PROOF = pytest.mark.proof


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "kills", "backend"),
    [
        ("async", 3, "torch_dist"),
        pytest.param("disabled", 20, "torch_dist", marks=_PROOF),
        pytest.param("async", 20, "torch_dist", marks=_PROOF),
        pytest.param("async_with_pinned_mem", 20, "torch_dist", marks=_PROOF),
        pytest.param("async", 3, "safetensors", marks=_PROOF),
    ],
    indirect=["backend"],
    scope="module",
)
@pytest.mark.ci
def test_a_killed_run_goes_on_from_the_newest_committed_step(
    ranks: Ranks, tmp_path: Path, mode: str, kills: int
) -> None:
    """SIGKILL at random moments: the newest committed step is resumed each time, and losses are the unkilled run's."""
    left = _kill_and_resume(ranks, tmp_path, str(tmp_path / "run"), mode, kills)
    assert all(name.startswith("step-") for name in left)
    assert len(left) == 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "kills", "backend"),
    [
        ("async", 3, "torch_dist"),
        pytest.param("disabled", 20, "torch_dist", marks=_PROOF),
        pytest.param("async", 20, "safetensors", marks=_PROOF),
    ],
    indirect=["backend"],
    scope="module",
)
@pytest.mark.proof
def test_a_killed_run_on_a_store_goes_on_from_the_newest_committed_step(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, kills: int
) -> None:
    """The same where the steps are on S3; what the killed saves have left there is gone with the later commits."""
    with moto_server() as endpoint:
        for name, value in variables(endpoint).items():
            monkeypatch.setenv(name, value)
        left = _kill_and_resume(ranks, tmp_path, f"s3://{BUCKET}/run", mode, kills)
    assert all(name.startswith("step-") for name in left)
    assert len(left) == 3


def _kill_and_resume(ranks: Ranks, tmp_path: Path, folder: str, mode: str, kills: int) -> list[str]:
    """Run the killed training, compare it with one that is not, and return the names that it has left."""
    arguments = (folder, str(tmp_path / "log"), mode, str(kills), "11")
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
    return list(told["left"])
