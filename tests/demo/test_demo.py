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
from shardckpt.demo.job import Layout, RankResult
from shardckpt.demo.outcome import TOLERANCE, Outcome, check
from shardckpt.errors import CheckpointingException
from shardckpt.manifest import Record

TIME_LIMIT = 240.0

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")


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


def test_the_demo_succeeds_and_says_nothing_on_stderr(demo: Demo) -> None:
    """A first-time user sees exit status 0, the closing line and no warning."""
    assert demo.err == ""
    assert demo.code == 0
    assert "\nAll agree, after " in demo.out


def test_the_demo_tells_its_progress(demo: Demo) -> None:
    """Every group says when it starts, saves or loads, and ends, before the report."""
    progress, _, _ = demo.out.partition("Losses after the checkpoint")
    for said in (
        "4 ranks: starting (FSDP2, gloo)",
        "4 ranks: step 10 of 16: loss ",
        "4 ranks: saved in ",
        "2 ranks: loaded in ",
        "1 rank: starting (a plain model, no process group)",
        "1 rank: loaded in ",
    ):
        assert said in progress


def test_losses_after_the_load_agree_side_by_side(demo: Demo) -> None:
    """Eight steps of 4, 2 and 1 ranks stand side by side, agree within the tolerance, and are not a fresh model's."""
    rows = demo.rows("Losses after the checkpoint of 4 ranks at step 16")
    assert [row[0] for row in rows] == [str(step) for step in range(17, 25)]
    for _, *losses, difference in rows:
        four, two, one = map(float, losses)
        assert two == pytest.approx(four, rel=TOLERANCE)
        assert one == pytest.approx(four, rel=TOLERANCE)
        assert float(difference) <= TOLERANCE
    fresh = re.search(r"the fresh models' losses were ([\d.]+) \(2 ranks\) and ([\d.]+) \(1 rank\)", demo.out)
    assert fresh is not None
    assert min(map(float, fresh.groups())) > float(rows[0][1]) + 1


def test_the_loaded_state_is_bit_for_bit_what_was_saved(demo: Demo) -> None:
    """Model and optimizer, gathered whole, have the digest that 4 ranks saved."""
    for part, digest, two, one in demo.rows("State bit for bit"):
        assert part in {"model", "optimizer"}
        assert re.fullmatch(r"[0-9a-f]{16}", digest)
        assert (two, one) == ("the same", "the same")


def test_the_table_of_files_is_what_lies_on_disk(demo: Demo, place: Path) -> None:
    """File, rank, bytes and keys are told for every data file, with the sizes on disk; shards come from all ranks."""
    rows = demo.rows("What was written where")
    *files, total = rows
    sizes = {name: int(size.replace(",", "")) for name, _, size, _ in files}
    on_disk = {path.name: path.stat().st_size for path in (place / "checkpoint").iterdir()}
    assert sizes == {name: size for name, size in on_disk.items() if name not in {"shardckpt.json", "metadata.json"}}
    assert total == ["total", f"{sum(sizes.values()):,}"]
    assert {(name, rank) for name, rank, _, keys in files if int(keys) > 100} == {
        (f"__{rank}_0.distcp", str(rank)) for rank in range(4)
    }


def test_shards_are_uneven_and_resharded(demo: Demo) -> None:
    """The demo shows tensors that no number of ranks divides, an empty shard among them."""
    rows = {row[0]: row[1:] for row in demo.rows("How tensors were resharded")}
    assert rows["model.embedding.weight"] == ["(257, 250)", "0:65 65:130 130:195 195:257", "0:129 129:257", "0:257"]
    assert rows["model.blocks.0.temperature"] == ["(5,)", "0:2 2:4 4:5 -", "0:3 3:5", "0:5"]
    assert "model.blocks.0.network.up.weight" in rows


@linux_only
def test_ranks_read_little_more_than_they_need(demo: Demo) -> None:
    """What each rank has of all tensors stands beside what it read; two ranks do not read the checkpoint twice."""
    (_, _, *loaders_have), (_, of_saver, *loaders_read) = demo.rows("How tensors were resharded")[-2:]
    assert of_saver == "-"
    for cells in zip(loaders_have, loaders_read, strict=True):
        has, read = (list(map(float, cell.split())) for cell in cells)
        assert all(mine <= taken for mine, taken in zip(has, read, strict=True))
        assert sum(read) < 1.5 * sum(has)


def test_speed_and_dispatch_are_told_for_every_operation(demo: Demo) -> None:
    """One save and two loads: seconds, MB and GB/s, and the strategy that the registry chose."""
    speeds = demo.rows("Speed of the slowest rank")
    assert [row[:2] for row in speeds] == [["save", "4 ranks"], ["load", "2 ranks"], ["load", "1 rank"]]
    assert all(float(seconds) > 0 and float(megabytes) > 30 for _, _, seconds, megabytes, _ in speeds)
    dispatched = demo.rows("What the registry dispatched to")
    assert [row[:4] for row in dispatched] == [[*row[:2], "torch_dist", "1"] for row in speeds]
    assert [row[4].rpartition(".")[2] for row in dispatched] == [
        "TorchDistSaveShardedStrategy",
        "TorchDistLoadShardedStrategy",
        "TorchDistLoadShardedStrategy",
    ]
    assert all(row[5].startswith("shardckpt ") for row in dispatched)


def test_the_kept_checkpoint_verifies(demo: Demo, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the demo leaves in ``--dir`` is a whole checkpoint, checked by the command that it prints."""
    assert f"shardckpt verify {place / 'checkpoint'}" in demo.out
    assert main(["verify", str(place / "checkpoint")]) == 0
    assert "__3_0.distcp" in capsys.readouterr().out


@pytest.fixture(scope="module")
def experts() -> Demo:
    """One demo with experts for all tests of its report."""
    return _demo("--moe")


@pytest.mark.slow
def test_experts_go_on_with_another_parallelism(experts: Demo) -> None:
    """Saved at ep 2 x efsdp 2; at ep 4, at ep 1 x efsdp 2 and in one process the same state goes on with one curve."""
    assert (experts.code, experts.err) == (0, "")
    assert "\nAll agree, after " in experts.out
    groups = ["ep 2 x efsdp 2", "ep 4 x efsdp 1", "ep 1 x efsdp 2", "1 rank"]
    rows = experts.rows("Losses after the checkpoint of ep 2 x efsdp 2 at step 16")
    assert len(rows) == 8
    assert all(len(row) == 2 + len(groups) and float(row[-1]) <= TOLERANCE for row in rows)
    parts = experts.rows("State bit for bit")
    assert [(row[0], *row[2:]) for row in parts] == [
        ("model", "the same", "the same", "the same"),
        ("optimizer", "the same", "the same", "the same"),
    ]
    dispatched = experts.rows("What the registry dispatched to")
    assert [row[:4] for row in dispatched] == [
        ["save" if name == groups[0] else "load", name, "ep", "1"] for name in groups
    ]


@pytest.mark.slow
def test_experts_are_dealt_out_first(experts: Demo) -> None:
    """Seven experts lie as trainers deal them out: over ep first, FSDP2 inside, and so unevenly."""
    rows = {row[0]: row[1:] for row in experts.rows("How tensors were resharded")}
    assert rows["model.blocks.0.network.experts.up"] == [
        "(7, 300, 250)",
        "0:2 4:6 2:4 6:7",
        "0:2 2:4 4:6 6:7",
        "0:4 4:7",
        "0:7",
    ]


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    """The demo never writes among other files: it exits 1 and says why, before anything starts."""
    (tmp_path / "mine").write_text("kept")
    demo = _demo("--dir", str(tmp_path))

    assert (demo.code, demo.out) == (1, "")
    assert f"shardckpt demo: {tmp_path} is not empty: give --dir a directory that is new or empty" in demo.err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_directory_that_cannot_be_made_is_a_reason(tmp_path: Path) -> None:
    """A path below a file is a failure with the operating system's reason, not a traceback."""
    (tmp_path / "file").write_text("")
    demo = _demo("--dir", str(tmp_path / "file" / "below"))

    assert (demo.code, demo.out) == (1, "")
    assert demo.err == f"shardckpt demo: cannot create the directory {tmp_path}/file/below: Not a directory (ENOTDIR)\n"


def test_a_failure_on_the_ranks_ends_the_demo_with_their_reason() -> None:
    """Without the default strategy's plugin the save fails on every rank, and the demo says so and exits 1."""
    demo = _demo("--steps", "1", SHARDCKPT_DISABLED_PLUGINS="torch_dist")

    assert demo.code == 1
    assert "All agree" not in demo.out
    assert "shardckpt demo: rank 0 of 4, rank 1 of 4, rank 2 of 4, rank 3 of 4: " in demo.err
    assert "no default strategy is registered" in demo.err


def _started(place: Path) -> tuple[subprocess.Popen[str], list[int]]:
    """A demo with its temporary files below a place, and the process ids of its four ranks."""
    demo = subprocess.Popen(
        _command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(place)}
    )
    children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children")
    limit = time.monotonic() + 30
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
def test_a_rank_that_dies_ends_the_demo_and_all_ranks(tmp_path: Path) -> None:
    """The demo names the rank that was killed, exits 1, and leaves no process behind."""
    demo, pids = _started(tmp_path)
    with demo:
        os.kill(pids[2], signal.SIGKILL)
        _, err = demo.communicate(timeout=TIME_LIMIT)

    assert demo.returncode == 1
    assert "rank 2 of 4: the process was ended by signal 9" in err
    assert _all_end(pids)


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_demo_is_the_end_of_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, a terminated or a killed demo leaves no rank behind."""
    demo, pids = _started(tmp_path)
    with demo:
        demo.send_signal(number)
        demo.communicate(timeout=TIME_LIMIT)

    assert demo.returncode != 0
    assert _all_end(pids)


def _outcome(**of_one_rank: object) -> Outcome:
    """Two groups that agree, but for what is told of the group of one rank."""
    good = RankResult(losses=[2.0, 1.5], digests={"model": "a", "optimizer": "b"})
    record = Record(
        save_id="x", backend="b", version=1, reader="", writer={}, world_size=2, digest_algorithm="", files=()
    )
    groups = {Layout(2): [good, good], Layout(1): [replace(good, **of_one_rank)]}  # type: ignore[arg-type]
    return Outcome(groups, record, 1)


def test_results_that_agree_pass_the_verdict() -> None:
    """Losses within the tolerance and equal digests are a success."""
    check(_outcome(losses=[2.0, 1.5 * (1 + TOLERANCE / 2)]))


@pytest.mark.parametrize(
    ("of_one_rank", "reason"),
    [
        ({"losses": [2.0, 1.5 * (1 + TOLERANCE * 2)]}, "losses differ by 2.0e-05, more than the tolerance 1e-05"),
        ({"losses": [2.0, float("nan")]}, "losses differ by inf"),
        ({"digests": {"model": "a", "optimizer": "c"}}, "the optimizer of 1 rank is not bit for bit what 2 ranks"),
    ],
)
def test_results_that_differ_fail_the_verdict(of_one_rank: dict[str, object], reason: str) -> None:
    """A loss beyond the tolerance, a NaN, or a state that is not bit for bit the saved one fails the demo."""
    with pytest.raises(CheckpointingException, match=reason):
        check(_outcome(**of_one_rank))
