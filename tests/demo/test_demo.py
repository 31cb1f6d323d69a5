"""``shardckpt demo`` as its user meets it: a process with an exit status, its report and its errors."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shardckpt.cli import main
from shardckpt.demo import TOLERANCE, Layout, Run, check
from shardckpt.errors import CheckpointingException
from tests.tables import table

TIME_LIMIT = 240.0

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
#: Of a whole demo, eleven starts of a process: .ci/run runs it first, by the README's command, which fails if it does.
report = pytest.mark.proof


@dataclass(frozen=True)
class Demo:
    """A demo that has ended."""

    code: int
    out: str
    err: str

    def rows(self, title: str) -> list[list[str]]:
        """The cells of the table under a title."""
        lines = self.out[self.out.index(title) :].splitlines()[3:]
        end = next((number for number, line in enumerate(lines) if not re.search(r"\S {2,}\S", line)), len(lines))
        return [re.split(r" {2,}", line.strip()) for line in lines[:end]]


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardckpt", "demo", *arguments]


def _demo(*arguments: str, **environment: str) -> Demo:
    done = subprocess.run(
        _command(*arguments),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        env=os.environ | environment,
        check=False,
    )
    return Demo(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory that the demo of this module keeps."""
    return tmp_path_factory.mktemp("demo") / "kept"


@pytest.fixture(scope="module")
def demo(place: Path) -> Demo:
    """One demo for all tests of its report, where numpy is absent: torch warns then, and shardckpt never needs it."""
    (place.parent / "numpy.py").write_text("raise ModuleNotFoundError(\"No module named 'numpy'\")")
    return _demo("--dir", str(place), PYTHONPATH=str(place.parent))


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


@pytest.mark.proof  # another eleven starts of a process: tests/demo/test_train.py trains experts on the ranks of a pool
def test_experts_go_on_with_another_parallelism() -> None:
    """Saved at ep 2 x efsdp 2; at ep 4, at ep 1 x efsdp 2 and in one process the same state goes on with one curve."""
    experts = _demo("--moe")
    assert (experts.code, experts.err) == (0, "")
    assert "\nAll agree, after " in experts.out
    groups = ["ep 2 x efsdp 2", "ep 4 x efsdp 1", "ep 1 x efsdp 2", "1 rank"]
    rows = experts.rows("Losses after the checkpoint of ep 2 x efsdp 2 at step 16")
    assert len(rows) == 8
    assert all(len(row) == 2 + len(groups) and float(row[-1]) <= TOLERANCE for row in rows)
    ((_, *loaded),) = experts.rows("Model and optimizer at the checkpoint, bit for bit")
    assert loaded == ["the same"] * 3


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The demo never writes among other files: it exits 2 and says why, before anything starts."""
    (tmp_path / "mine").write_text("kept")
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"shardckpt demo: {tmp_path} is not empty: give --dir a directory that is new or empty" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_cannot_be_made_is_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path below a file is a failure with the operating system's reason, not a traceback."""
    (tmp_path / "file").write_text("")
    assert main(["demo", "--dir", str(tmp_path / "file" / "below")]) == 2
    reason = f"cannot create the directory {tmp_path}/file/below: Not a directory (ENOTDIR)"
    assert capsys.readouterr() == ("", f"shardckpt demo: {reason}\n")


@pytest.mark.proof  # starts five interpreters, as the test of a rank that dies does
def test_a_failure_on_the_ranks_ends_the_demo_with_their_reason() -> None:
    """Without the default strategy's plugin the save fails on every rank, and the demo says so and exits 2."""
    demo = _demo("--steps", "1", SHARDCKPT_DISABLED_PLUGINS="torch_dist")

    assert demo.code == 2
    assert "All agree" not in demo.out
    assert "shardckpt demo: rank 0 of 4, rank 1 of 4, rank 2 of 4, rank 3 of 4: " in demo.err
    assert "no default strategy is registered" in demo.err


def _started(place: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A demo with its temporary files below a place, and the process ids of its four ranks."""
    demo = subprocess.Popen(
        _command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(place)}
    )
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    limit = time.monotonic() + 120
    while len(found := children.read_text().split()) < 4:
        assert demo.poll() is None, demo.communicate()
        assert time.monotonic() < limit, found
        time.sleep(0.02)
    return demo, list(map(int, found))


def _running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _all_end(pids: list[int]) -> bool:
    """Whether all processes end in time for a rank that was still importing torch to notice."""
    limit = time.monotonic() + 60
    while any(map(_running, pids)):
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True


@linux_only
@pytest.mark.proof
def test_a_rank_that_dies_ends_the_demo_and_all_ranks(tmp_path: Path) -> None:
    """The demo names the rank that was killed, exits 2, and leaves no process behind."""
    demo, pids = _started(tmp_path)
    with demo:
        os.kill(pids[2], signal.SIGKILL)
        _, err = demo.communicate(timeout=TIME_LIMIT)

    assert demo.returncode == 2
    assert "rank 2 of 4: the process was ended by signal 9" in err
    assert _all_end(pids)


@linux_only
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.ci),
        pytest.param(signal.SIGTERM, marks=pytest.mark.proof),
        pytest.param(signal.SIGKILL, marks=pytest.mark.ci),
    ],
)
def test_the_end_of_the_demo_is_the_end_of_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a terminated or a killed demo leaves no rank behind."""
    demo, pids = _started(tmp_path)
    with demo:
        demo.send_signal(number)
        demo.communicate(timeout=TIME_LIMIT)

    assert demo.returncode != 0
    assert _all_end(pids)


def _runs(layout: Layout, state: str = "digest") -> list[Run]:
    """Two groups that agree, but for what is given of the second."""
    good = Run(Layout(2), {1: 3.0, 2: 2.0, 3: 1.5}, "digest")
    return [good, Run(layout, {2: 2.0, 3: 1.5}, state)]


def test_results_that_agree_pass_the_check() -> None:
    """Losses within the tolerance and equal digests are a success."""
    check(_runs(Layout(2)))
    check(_with_loss(Layout(1), 1.5 * (1 + TOLERANCE / 2)))


def _with_loss(layout: Layout, loss: float) -> list[Run]:
    first, second = _runs(layout)
    return [first, replace(second, losses={2: 2.0, 3: loss})]


@table(
    ("runs", "reason"),
    [
        (_with_loss(Layout(1), 1.5 * (1 + TOLERANCE * 2)), "losses of 1 rank differ by 2.0e-05, more than the toler"),
        (_with_loss(Layout(2), 1.5 * (1 + TOLERANCE / 2)), "losses of 2 ranks differ by 5.0e-06, more than the toler"),
        (_with_loss(Layout(1), float("nan")), "losses of 1 rank differ by inf"),
        (_runs(Layout(1), state="another"), "as 1 rank loaded them are not bit for bit what 2 ranks saved"),
    ],
)
def test_results_that_differ_fail_the_check(runs: list[Run], reason: str) -> None:
    """A loss beyond the tolerance, any other with the same ranks, a NaN, or a state with another bit fails the demo."""
    with pytest.raises(CheckpointingException, match=reason):
        check(runs)
