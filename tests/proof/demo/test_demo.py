"""``shardckpt demo`` as its user meets it: a process with an exit status, its report and its errors."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from shardckpt.cli import main
from shardckpt.demo.launch import TOLERANCE
from tests.demo.demo import TIME_LIMIT, Demo, all_end, demo, linux_only, place, report, run_demo, started

__all__ = ["demo", "place"]  # fixtures


@report
def test_the_demo_tells_what_it_does_and_succeeds(demo: Demo) -> None:
    """A first-time user sees each group start, save, load and end, no warning, that all agree, and what to copy."""
    progress, _, _ = demo.out.partition("Losses after the checkpoint")
    for said in (
        "4 ranks: starting (FSDP2, gloo)",
        "4 ranks: step 1: loss 5.",
        "4 ranks: saved step 16",
        "4 ranks: killed after step 24: ",
        "4 ranks: loaded step 16",
        "2 ranks: loaded step 16",
        "2 ranks: killed after step 24: ",
        "1 rank: starting (a plain model, no process group)",
        "1 rank: loaded step 16",
        "1 rank: saved step 24",
    ):
        assert said in progress
    assert demo.err == ""
    assert demo.code == 0
    assert "\nAll agree, after " in demo.out
    (path,) = re.findall(r"to copy from: (\S+)", demo.out)
    assert "manager.save(" in Path(path).read_text()


@report
def test_losses_after_the_load_agree_side_by_side(demo: Demo) -> None:
    """The state loads bit for bit; eight steps of 4 ranks come again with 4, and with 2 and 1 within the tolerance."""
    ((digest, *loaded),) = demo.rows("Model and optimizer at the checkpoint, bit for bit")
    assert re.fullmatch(r"[0-9a-f]{16}", digest)
    assert loaded == ["the same"] * 3
    rows = demo.rows("Losses after the checkpoint of 4 ranks at step 16")
    assert [row[0] for row in rows] == [str(step) for step in range(17, 25)]
    for _, *losses, difference in rows:
        four, again, two, one = map(float, losses)
        assert again == four < 5
        assert two == pytest.approx(four, rel=TOLERANCE)
        assert one == pytest.approx(four, rel=TOLERANCE)
        assert float(difference) <= TOLERANCE


@report
def test_the_kept_checkpoint_verifies(demo: Demo, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the demo leaves in ``--dir`` is a whole checkpoint, checked by the command that it prints."""
    checkpoint = place / "checkpoints" / "step-16"
    assert f"shardckpt verify {checkpoint}" in demo.out
    assert main(["verify", str(checkpoint)]) == 0
    assert "__3_0.distcp" in capsys.readouterr().out


def test_experts_go_on_with_another_parallelism() -> None:
    """Saved at ep 2 x efsdp 2; at ep 4, at ep 1 x efsdp 2 and in one process the same state goes on with one curve."""
    experts = run_demo("--moe")
    assert (experts.code, experts.err) == (0, "")
    assert "\nAll agree, after " in experts.out
    groups = ["ep 2 x efsdp 2", "ep 4 x efsdp 1", "ep 1 x efsdp 2", "1 rank"]
    rows = experts.rows("Losses after the checkpoint of ep 2 x efsdp 2 at step 16")
    assert len(rows) == 8
    assert all(len(row) == 2 + len(groups) and float(row[-1]) <= TOLERANCE for row in rows)
    ((_, *loaded),) = experts.rows("Model and optimizer at the checkpoint, bit for bit")
    assert loaded == ["the same"] * 3


def test_a_failure_on_the_ranks_ends_the_demo_with_their_reason() -> None:
    """Without the default strategy's plugin the save fails on every rank, and the demo says so and exits 2."""
    demo = run_demo("--steps", "1", SHARDCKPT_DISABLED_PLUGINS="torch_dist")

    assert demo.code == 2
    assert "All agree" not in demo.out
    assert "shardckpt demo: rank 0 of 4, rank 1 of 4, rank 2 of 4, rank 3 of 4: " in demo.err
    assert "no default strategy is registered" in demo.err


@linux_only
def test_a_rank_that_dies_ends_the_demo_and_all_ranks(tmp_path: Path) -> None:
    """The demo names the rank that was killed, exits 2, and leaves no process behind."""
    demo, pids = started(tmp_path)
    with demo:
        os.kill(pids[2], signal.SIGKILL)
        _, err = demo.communicate(timeout=TIME_LIMIT)

    assert demo.returncode == 2
    assert "rank 2 of 4: the process was ended by signal 9" in err
    assert all_end(pids)
