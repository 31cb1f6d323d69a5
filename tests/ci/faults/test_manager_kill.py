from __future__ import annotations

import json
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

from tests import programs
from tests.manager import jobs
from tests.remote.servers import BUCKET, moto_server, variables
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import Ranks

_PROOF = [
    ("directory", "disabled", 20, "torch_dist"),
    ("directory", "async", 20, "torch_dist"),
    ("directory", "async_with_pinned_mem", 20, "torch_dist"),
    ("directory", "async", 3, "safetensors"),
    ("S3", "async", 3, "torch_dist"),
    ("S3", "disabled", 20, "torch_dist"),
    ("S3", "async", 20, "safetensors"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("place", "mode", "kills", "backend"),
    [("directory", "async", 3, "torch_dist"), *in_proof(*_PROOF)],
    indirect=["backend"],
    scope="module",
)
def test_a_killed_run_goes_on_from_the_newest_committed_step(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, mode: str, kills: int
) -> None:
    """SIGKILL at random moments: the newest committed step is resumed each time, and losses are the unkilled run's.

    What the killed saves have left, in a directory or on S3, is gone with the later commits.
    """
    with moto_server() if place == "S3" else nullcontext() as endpoint:
        for name, value in variables(endpoint).items() if endpoint else ():
            monkeypatch.setenv(name, value)
        folder = f"s3://{BUCKET}/run" if endpoint else str(tmp_path / "run")
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
    assert all(name.startswith("step-") for name in told["left"])
    assert len(told["left"]) == 3
