"""``shardckpt prune`` with retention policies; leftovers are in ``tests/engine/test_pruning.py``."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.manifest.names import CONTENT_KEY
from shardckpt.mapping import ShardedTensor
from tests.backends import Backend, both_in_proof
from tests.cli.checkpoints import damage
from tests.commit import owners
from tests.damage import flip
from tests.manager import folders
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

LOSSES = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.3, 5: 0.6}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Five steps with losses, as a CheckpointManager stores them."""
    for step, loss in LOSSES.items():
        content = {CONTENT_KEY: {"metrics": {"loss": loss}}}
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
        dc.save(state, tmp_path / f"step-{step}", content_metadata=content, step=step)
    return tmp_path


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


@both_in_proof
def test_prune_keeps_what_a_policy_keeps(backend: Backend, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run has the same rows, within 80 columns, and removes nothing; the second time nothing is left to do."""
    arguments = ["prune", str(folder), "--keep-latest", "1", "--keep-best", "loss", "--keep-step", "1"]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert _steps(folder) == [1, 2, 3, 4, 5]
    rows = {line.split()[0]: line.split("kB  ")[1] for line in said.splitlines()[2:7]}
    assert rows == {
        "step-1": "kept: --keep-step names it",
        "step-2": "kept: among the best 1 by loss (min)",
        "step-3": "would be removed",
        "step-4": "would be removed",
        "step-5": "kept: it is the newest, among the newest 1",
    }
    assert max(map(len, said.splitlines()[:7])) <= 80
    freed = sum(path.stat().st_size for step in (3, 4) for path in (folder / f"step-{step}").iterdir())
    assert said.splitlines()[-1] == f"{freed:,} bytes would be freed in {folder}"
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{freed:,} bytes freed in {folder}"
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-2", "step-5"]
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was found to remove"


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--keep-near", "4"], [1, 4, 5]),
        (["--keep-hours", "1"], [1, 2, 3, 4, 5]),
        (["--keep-verified", "1"], [2, 5]),
        (["--keep-near", "3", "--keep-verified", "1"], [1, 2, 3, 5]),
    ],
)
def test_prune_takes_each_policy(folder: Path, options: list[str], left: list[int]) -> None:
    """The options combine: what any of them keeps stays, and the newest and the newest verified step in any case."""
    if "--keep-verified" in options:
        assert main(["verify", str(folder / "step-2"), "--mark"]) == 0
    assert main(["prune", str(folder), *options]) == 0
    assert _steps(folder) == left


def test_prune_counts_no_damaged_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A damaged step is kept, with its fault, and is not the newest of what can be loaded."""
    damage(folder / "step-5" / "__0_0.distcp", "cut by a byte")
    assert main(["prune", str(folder), "--keep-latest", "1"]) == 0
    assert _steps(folder) == [4, 5]
    out = capsys.readouterr().out
    assert "__0_0.distcp has" in out
    assert "kept: damaged: " in out
    assert "--damaged says whether it may go" in out, "the row says what would remove it"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        *(
            ([f"--keep-hours={hours}"], "is not a number of hours above 0")
            for hours in ("0", "-1", "inf", "nan", "day")
        ),
        (["--keep-latest", "0"], "'0' is not a whole number above 0"),
        (["--keep-best", "loss:most"], "is not METRIC"),
        (["--keep-step", "3"], "give a rule, too, such as --keep-latest 3"),
    ],
)
def test_prune_refuses_wrong_policies(
    folder: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """2, with what is right, and nothing is removed."""
    with pytest.raises(SystemExit, match="2"):
        main(["prune", str(folder), *arguments])
    assert text in capsys.readouterr().err
    assert _steps(folder) == [1, 2, 3, 4, 5]


@both_in_proof
def test_prune_leaves_an_intact_step_if_it_may_read_them(
    backend: Backend, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --verify a flipped bit in the newest step does not leave it alone: the newest intact one is kept, too."""
    for step in (4, 5):
        damage(folder / f"step-{step}" / backend.data_file(0), "zeros")
    arguments = ["prune", str(folder), "--keep-latest", "1", "--verify"]
    assert main([*arguments, "--dry-run"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split() for line in said[2:5]] == [
        [str(folder / f"step-{step}"), verdict] for step, verdict in ((5, "failed"), (4, "failed"), (3, "verified"))
    ]
    assert not (folder / ".shardckpt-marks").exists()  # a dry run writes nothing
    assert main(arguments) == 1
    assert capsys.readouterr().out.splitlines()[2:5] == said[2:5]
    assert _steps(folder) == [3, 5]
    assert main(arguments) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[2].split(None, 1)[1] == "marked as failed"  # nothing is read twice
    assert _steps(folder) == [3, 5]
    with pytest.raises(SystemExit, match="2"):
        main(["prune", str(folder), "--verify"])
    assert "--keep-latest" in capsys.readouterr().err


def test_prune_of_a_checkpoint_itself_verifies_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The path of one checkpoint, in the place of its folder's, is an error: nothing is looked for below it."""
    assert main(["prune", str(folder / "step-5"), "--keep-latest", "1", "--verify"]) == 2
    said = capsys.readouterr()
    assert "is a checkpoint, not a folder of steps, and nothing was done" in said.err
    assert not said.out


def test_prune_counts_no_damaged_step_of_another_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plain DCP's newest step without its data file is kept, with its fault, and the older whole one, too."""
    for step in (1, 2):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    (tmp_path / "step-2" / "__0_0.distcp").unlink()
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert _steps(tmp_path) == [1, 2]
    assert "__0_0.distcp is missing" in capsys.readouterr().out


@table("damaged", [False, True])
def test_prune_reads_another_librarys_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str], damaged: bool) -> None:
    """With --verify a flipped bit in plain DCP's newest step leaves the older intact one; with --damaged alone that."""
    for step in (1, 2, 3):
        dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    flip(tmp_path / "step-3" / "__0_0.distcp")
    arguments = ["prune", str(tmp_path), "--keep-latest", "1", "--verify", *["--damaged"] * damaged]
    assert main(arguments) == 1
    said = capsys.readouterr().out
    assert ("kept: damaged, as the verification before this prune has found: --damaged removes it" in said) != damaged
    assert _steps(tmp_path) == ([2] if damaged else [2, 3])


def test_a_failed_step_takes_no_others_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The best step that is not marked as failed stays beside the best one, which is; --damaged removes that."""
    damage(folder / "step-2" / "__0_0.distcp", "zeros")
    assert main(["verify", str(folder / "step-2"), "--mark"]) == 1
    capsys.readouterr()
    assert main(["prune", str(folder), "--keep-best", "loss"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("step-")}
    assert "among the best 1 by loss (min), marked failed" in rows["step-2"]
    assert _steps(folder) == [2, 4, 5]
    assert main(["prune", str(folder), "--keep-best", "loss", "--damaged", "--older-than", "0"]) == 0
    assert _steps(folder) == [4, 5]


def test_a_step_without_its_record_takes_no_others_place(folder: Path) -> None:
    """One that ``ls`` calls damaged, since its digests are lost, stays as the newest, and the newest whole one, too."""
    (folder / "step-5" / "shardckpt.json").unlink()
    assert main(["ls", str(folder)]) == 1
    assert main(["prune", str(folder), "--keep-latest", "1"]) == 0
    assert _steps(folder) == [4, 5]


def test_prune_says_where_the_words_lead_then(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``best`` of another step is said in the row of the step that goes, in a dry run and with --json, too."""
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4)):
        folders.save(tmp_path, step, config={"best_metric": "loss", "best_mode": "min", "links": True}, loss=loss)
    (tmp_path / "best").symlink_to("step-1")
    call = ["prune", str(tmp_path), "--keep-latest", "1"]
    assert main([*call, "--dry-run"]) == 0
    assert "would be removed, best would be step-3\n" in capsys.readouterr().out
    assert main([*call, "--dry-run", "--json"]) == 0
    assert [each["moves"] for each in json.loads(capsys.readouterr().out)["steps"]] == [{"best": "step-3"}, {}, {}]
    assert main(call) == 0
    assert "removed, best is now step-3\n" in capsys.readouterr().out
    assert str((tmp_path / "best").readlink()) == "step-3"


def test_a_word_that_a_link_of_the_users_has_does_not_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such a link holds its step; what the configuration would call the best is not said."""
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4)):
        folders.save(tmp_path, step, config={"best_metric": "loss", "best_mode": "min"}, loss=loss)
    (tmp_path / "best").symlink_to("step-2")
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    out = capsys.readouterr().out
    assert "kept: best is a link to it" in out
    assert "is now" not in out


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs of three steps, one of them two folders deep, and what a killed save left beside one's steps."""
    for run in ("runs/a", "runs/old/b"):
        for step in (1, 2, 3):
            content = {CONTENT_KEY: {"metrics": {"loss" if run == "runs/a" else "acc": step}}}
            state = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
            dc.save(state, tmp_path / run / f"step-{step}", content_metadata=content, step=step)
    owners.leave(tmp_path / "runs" / "a" / "step-4", owners.dead())
    return tmp_path / "runs"


def test_prune_of_a_folder_of_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """-r prunes each run by itself, with one table of steps and one of leftovers; a dry run removes nothing."""
    arguments = ["prune", "-r", str(runs), "--keep-latest", "1"]
    assert main([*arguments, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines() if line.endswith("would be removed")] == [
        *(f"{run}/step-{step}" for run in ("a", "old/b") for step in (1, 2)),
        next(line.split()[0] for line in said.splitlines() if line.startswith("a/.step-4.")),
    ]
    assert (said.count("checkpoint  "), said.count("leftover  ")) == (1, 1)
    assert len([*runs.rglob("step-*/metadata.json")]) == 6
    assert main(arguments) == 0
    assert capsys.readouterr().out.splitlines()[3:7] == said.replace("would be ", "").splitlines()[3:7]
    left = [path.parent.relative_to(runs).as_posix() for path in runs.rglob("metadata.json")]
    assert sorted(left) == ["a/step-3", "old/b/step-3"]
    assert [*runs.rglob(".step-*")] == []


@pytest.mark.parametrize("above", [".", "killed"])
def test_a_folder_with_nothing_but_leftovers_is_seen(
    runs: Path, above: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A first save that was killed has left a hidden directory alone: ls -r names the call, and prune -r removes it."""
    (runs / "killed" / "run").mkdir(parents=True)
    left = owners.leave(runs / "killed" / "run" / "step-1", owners.dead())
    folder = str(runs / above)
    main(["ls", "-r", folder])
    assert f"`shardckpt prune {runs}/{above}/".replace("/./", "/") in capsys.readouterr().out.replace("/./", "/")
    assert main(["prune", "-r", folder, "--dry-run", "--keep-latest", "9"]) == 0
    said = capsys.readouterr().out
    assert len([line for line in said.splitlines() if "run/.step-1." in line]) == 1
    assert main(["prune", "-r", folder]) == 0
    assert not left.exists()


def test_prune_does_not_follow_links_out_of_its_path(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A link to another team's run is left alone and named; one within PATH is the run itself, which is pruned once."""
    (runs.parent / "other").mkdir()
    (runs / "a").rename(runs.parent / "other" / "a")
    (runs / "a").symlink_to("../other/a")
    (runs / "again").symlink_to("old/b")
    assert main(["prune", "-r", str(runs), "--keep-latest", "1"]) == 0
    out = capsys.readouterr().out
    assert f"not followed: 1 link to other folders: {runs}/a" in out.splitlines()
    assert _steps(tmp_path / "other" / "a") == [1, 2, 3]
    assert _steps(runs / "old" / "b") == [3]
    assert "again" not in out
    main(["ls", "-r", str(tmp_path)])
    assert "again" not in capsys.readouterr().out
    (tmp_path / "links").mkdir()
    (runs / "a").rename(tmp_path / "links" / "a")
    assert main(["prune", "-r", str(tmp_path / "links")]) == 2
    assert f"nothing was removed; not followed: 1 link to other folders: {tmp_path}/links/a" in capsys.readouterr().err


def test_a_run_without_the_metric_stays(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps stay, which blocks no other run, and what killed saves have left in it goes.

    A metric that no run has is an error that names the nearest of all runs.
    """
    assert main(["prune", "-r", str(runs), "--keep-best", "los"]) == 2
    assert "no step has a value of the metric 'los'" in (said := capsys.readouterr().err)
    assert "(did you mean loss? metrics: acc, loss)" in said
    assert main(["prune", "-r", str(runs), "--keep-best", "loss", "--json", "--dry-run"]) == 0
    assert [each["path"] for each in json.loads(capsys.readouterr().out)["lacking"]] == [f"{runs}/old/b"]
    left = owners.leave(runs / "old" / "b" / "step-9", owners.dead())
    assert main(["prune", "-r", str(runs), "--keep-best", "loss"]) == 0
    assert f"left with all steps, since none has the metric: 1 folder: {runs}/old/b" in capsys.readouterr().out
    assert not left.exists()
    assert (_steps(runs / "a"), _steps(runs / "old" / "b")) == ([1, 3], [1, 2, 3])
    assert main(["prune", "-r", str(runs / "old"), "--keep-best", "loss"]) == 2


def test_what_is_an_error_for_one_run_is_one_for_all(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step to keep that one run lacks is an error that names the run, and nothing is removed of the others."""
    shutil.rmtree(runs / "old" / "b" / "step-2")
    assert main(["prune", "-r", str(runs), "--keep-latest", "1", "--keep-step", "2"]) == 2
    assert f"{runs}/old/b: {runs}/old/b has no step 2" in capsys.readouterr().err
    assert len([*runs.rglob("metadata.json")]) == 5
    assert main(["prune", str(runs), "--keep-latest", "1"]) == 2
    assert "checkpoints are in its folders a, old: give one of these, or -r for all" in capsys.readouterr().err


def test_skip_errors_prunes_the_other_runs(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The error names the option; with it the run without the step stays, its error is said, and the rest goes."""
    shutil.rmtree(runs / "old" / "b" / "step-2")
    arguments = ["prune", "-r", str(runs), "--keep-latest", "1", "--keep-step", "2"]
    assert main(arguments) == 2
    assert "--skip-errors prunes the other folders" in capsys.readouterr().err
    assert main([*arguments, "--skip-errors"]) == 2
    said = capsys.readouterr()
    assert f"{runs}/old/b has no step 2" in said.err
    assert f"left as it was, after an error: 1 folder: {runs}/old/b" in said.out.splitlines()
    assert (_steps(runs / "a"), _steps(runs / "old" / "b")) == ([2, 3], [1, 3])
    assert main([*arguments, "--skip-errors", "--json"]) == 2
    assert [each["path"] for each in json.loads(capsys.readouterr().out)["skipped"]] == [f"{runs}/old/b"]
    assert main(["prune", "-r", str(runs / "old"), *arguments[3:], "--skip-errors"]) == 2
    assert "has no step 2" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["prune", str(runs), "--skip-errors"])
    assert "--skip-errors needs -r" in capsys.readouterr().err


def test_the_beginning_of_several_options_names_these(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--keep 2` is none of the options that begin so: the error names them, and guesses none."""
    with pytest.raises(SystemExit):
        main(["prune", str(folder), "--keep", "2"])
    assert "--keep 2 (options that begin so: --keep-latest, --keep-every, " in capsys.readouterr().err
    (folder / "step-6").mkdir()
    (folder / "step-6" / "common.pt").write_bytes(b"x")
    assert main(["prune", str(folder), "--keep-latest", "1", "--dry-run"]) == 0
    assert "kept: not a distributed checkpoint, or a save to it did not end" in capsys.readouterr().out


def test_prune_takes_several_folders(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ls and verify do: rows begin with the folder as it was given, and an error of one is one for all."""
    monkeypatch.chdir(runs)
    for wrong, why in (("missing", "missing is no directory"), ("old", "checkpoints are in its folders b")):
        for options in ([], ["--keep-latest", "1"]):
            if options or wrong == "missing":
                assert main(["prune", "a", wrong, *options]) == 2
                assert why in capsys.readouterr().err
    assert [path.name for path in (runs / "a").glob(".step-*")] != []
    assert main(["prune", "a", "old/b", "--keep-latest", "1"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("removed")][:4] == [
        f"{run}/step-{step}" for run in ("a", "old/b") for step in (1, 2)
    ]
    assert out.splitlines()[-1].endswith(" bytes freed in 2 folders")


def test_sound_steps_are_counted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--damaged alone names what goes, and what stays for a reason; sound steps are counted, and named by -v."""
    damage(runs / "a" / "step-1" / "__0_0.distcp", "cut to a half")
    arguments = ["prune", "-r", str(runs), "--damaged", "--older-than", "0", "--dry-run"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "5 steps stay, whole by the sizes of their files: -v names them" in out.splitlines()
    assert ("a/step-1" in out, "a/step-2" in out) == (True, False)
    assert main([*arguments, "-v"]) == 0
    assert "a/step-2" in capsys.readouterr().out
