"""``FOLDER/latest`` and ``FOLDER/best`` in what is read."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import ShardedTensor, dist_checkpointing
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, NotACheckpointError
from shardckpt.manager import find_holds, find_named_step
from shardckpt.manager.marks import identify_save, mark_checkpoint
from tests.manager import folders
from tests.tables import table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

LOSSES = {1: 0.5, 2: 0.1, 3: 0.4}


def _make(folder: Path, config: Any = None) -> None:
    """Three steps with losses, as a manager with such a configuration saves them."""
    config = {"best_metric": "loss", "best_mode": "min"} if config is None else config
    for step, loss in LOSSES.items():
        folders.save(folder, step, config=config, loss=loss)


@table("arguments", [["inspect"], ["verify"], ["ls"], ["diff", "{0}/step-1"]])
def test_verbs_read_the_steps_that_words_name(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a folder without links ``latest`` and ``best`` are what the listing says, on a store, too."""
    _make(tmp_path)
    for folder in (str(tmp_path), f"local://{tmp_path}"):
        for word, step in (("latest", 3), ("best", 2)):
            verb, *rest = (each.format(folder) for each in arguments)
            code = main([verb, f"{folder}/step-{step}", *rest, "--json"])
            expected = capsys.readouterr()
            assert main([verb, f"{folder}/{word}/", *rest, "--json"]) == code
            found = capsys.readouterr()
            assert found == expected
            assert f"/{word}" not in found.out + found.err


def test_what_is_written_is_made_of_one_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conversions, exports and merges read the step; no target has such a name, but what has it is read by it."""
    runs = tmp_path / "runs"
    _make(runs)
    monkeypatch.chdir(runs)
    assert main(["convert", "latest", str(tmp_path / "safetensors"), "--to", "safetensors"]) == 0
    assert main(["export", f"{runs}/best", str(tmp_path / "hub")]) == 0
    assert main(["merge", f"{runs}/best", "best", str(tmp_path / "mean")]) == 0
    assert main(["diff", str(tmp_path / "mean"), "best", "--tensors-only"]) == 0
    assert main(["convert", "step-1", "latest", "--to", "safetensors"]) == 2
    assert not (runs / "latest").exists()
    (tmp_path / "safetensors").rename(runs / "latest")
    capsys.readouterr()
    assert main(["inspect", f"{runs}/latest", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == "safetensors"
    assert find_named_step(f"{runs}/latest") == f"{runs}/latest"


def test_the_latest_is_whole_and_has_not_failed(tmp_path: Path) -> None:
    """Damaged, unfinished and failed steps are passed over, and a link that leads nowhere does not count."""
    folders.save_all(tmp_path, 1, 2, 3, 4, name="ckpt_{:06}")
    folders.damage(tmp_path / "ckpt_000004")
    save = identify_save(tmp_path / "ckpt_000003")
    mark_checkpoint(tmp_path / "ckpt_000003", save, "failed", checked="digests", files=3, faults=("x is cut",))
    (tmp_path / "latest").symlink_to("ckpt_000009")
    assert find_named_step(f"{tmp_path}/latest") == f"{tmp_path}/ckpt_000002"


def test_copies_of_steps_are_no_steps(tmp_path: Path) -> None:
    """A copy in another format has the number of its source, and a name that is no step's; files count by theirs."""
    folders.save_all(tmp_path, 1, 2)
    dist_checkpointing.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "zz", step=2)
    assert find_named_step(f"{tmp_path}/latest") == f"{tmp_path}/step-2"
    torch.save({"w": torch.ones(2)}, tmp_path / "epoch=1-step=300.ckpt")
    assert find_named_step(f"{tmp_path}/latest") == f"{tmp_path}/epoch=1-step=300.ckpt"


def test_a_copy_takes_the_place_of_no_damaged_step(tmp_path: Path) -> None:
    """Where the only step is damaged, there is no latest one: a copy of it beside it is not meant."""
    folders.save_all(tmp_path, 4)
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-4 (copy)")
    (tmp_path / "step-4" / "shardckpt.json").write_text("{}")
    with pytest.raises(NotACheckpointError, match=r"no latest step: none is whole \(step-4: damaged\)"):
        find_named_step(f"{tmp_path}/latest")


def test_a_pointer_file_says_which_step(tmp_path: Path) -> None:
    """A file with the name of a directory beside it, as DeepSpeed writes it, stands for that; any other for itself."""
    for number in (2, 4):
        shutil.copytree(GOLDEN / "deepspeed" / "zero2", tmp_path / f"global_step{number}")
    latest = tmp_path / "latest"
    assert find_named_step(str(latest)) == str(tmp_path / "global_step4")
    latest.write_text("global_step2\n")
    assert find_named_step(str(latest)) == str(tmp_path / "global_step2")
    for other in ("", "..", "../x", "global_step3", "\0", "x" * 300):
        latest.write_text(other)
        assert find_named_step(str(latest)) == str(latest)


@table("config", [{}, {"best_metric": ""}, {"best_metric": 3, "best_mode": "min"}, {"retention": "KeepBest"}, "other"])
def test_a_best_step_that_nobody_names_is_an_error(tmp_path: Path, config: Any) -> None:
    """The metrics are listed: by a guessed one, or the wrong end of one, the best may be the worst."""
    _make(tmp_path, config)
    with pytest.raises(CheckpointingException, match=r"no step says which is: .* \(metrics: loss\)"):
        find_named_step(f"{tmp_path}/best")
    folders.save_all(tmp_path / "without", 1)
    with pytest.raises(CheckpointingException, match="no step there has metrics"):
        find_named_step(f"{tmp_path}/without/best")


def test_words_without_steps_are_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where there is no step, or no folder, the error is that of a path that is not there."""
    for path in (f"{tmp_path}/latest", f"{tmp_path}/nowhere/best", f"local://{tmp_path}/latest", f"{tmp_path}/other"):
        assert find_named_step(path) == path
        assert main(["inspect", path]) == 2
        assert "does not exist" in capsys.readouterr().err


@table("place", ["{}", "local://{}"])
def test_a_folder_without_a_whole_step_says_what_it_has(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """``latest`` and ``best`` are no missing directories there: each step is named with its state."""
    folders.save_all(tmp_path, 1, 2)
    folders.damage(tmp_path / "step-1")
    save = identify_save(tmp_path / "step-2")
    mark_checkpoint(tmp_path / "step-2", save, "failed", checked="digests", files=3, faults=("x is cut",))
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "__0_0.distcp").touch()
    folder = place.format(tmp_path)
    for word in ("latest", "best"):
        assert main(["inspect", f"{folder}/{word}"]) == 2
        said = f"{folder} has no {word} step: none is whole (step-1: damaged, step-2: failed, step-3: incomplete)"
        assert said in capsys.readouterr().err


def test_a_misspelt_word_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a folder without links, too; where a name that is there is nearer, that is the answer."""
    _make(tmp_path)
    for path, nearest in (("lates", f"{tmp_path}/latest"), ("bets/", f"{tmp_path}/best"), ("stpe-1", "step-1")):
        assert main(["inspect", f"{tmp_path}/{path}"]) == 2
        assert f"did you mean {nearest}?" in capsys.readouterr().err
    (tmp_path / "latest").symlink_to("step-1")
    assert main(["inspect", f"{tmp_path}/lates"]) == 2
    assert f"did you mean {tmp_path}/latest?" in capsys.readouterr().err


def test_ls_says_which_is_latest_and_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The links are said of their steps' rows, and the star is at the best by the manager's metric and mode."""
    _make(tmp_path, {"best_metric": "loss", "best_mode": "max"})
    for link, step in (("latest", 3), ("best", 1)):
        (tmp_path / link).symlink_to(f"step-{step}")
    assert main(["ls", str(tmp_path)]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("step-")}
    assert set(rows) == {"step-1", "step-2", "step-3"}
    assert "0.5 *" in rows["step-1"]
    assert rows["step-1"].endswith("whole, best")
    assert rows["step-3"].endswith("whole, latest")
    folders.damage(tmp_path / "step-3")
    assert main(["ls", str(tmp_path)]) == 1
    assert "damaged, latest: __0_0.distcp has " in capsys.readouterr().out


def test_a_word_is_pinned_as_the_step_that_it_is_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``pin FOLDER best`` says and holds that step, by the listing or a link; a later best step is another."""
    _make(tmp_path)
    assert main(["pin", str(tmp_path), "best", "--label", "paper"]) == 0
    assert capsys.readouterr().out == "step-2 is pinned as 'paper'\n"
    (tmp_path / "latest").symlink_to("step-1")
    assert main(["pin", f"{tmp_path}/", "latest", "--label", "old"]) == 0
    assert find_holds(tmp_path).keys() == {"step-1", "step-2"}
    assert main(["pin", str(tmp_path), "best", "--label", "paper", "--remove"]) == 0
    assert find_holds(tmp_path).keys() == {"step-1"}
