"""``shardckpt prune`` and ``pin`` of steps that other libraries wrote, in formats that no manager loads."""

from __future__ import annotations

import json
from pathlib import Path  # noqa: TC003 - pytest reads the annotations of fixtures
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from shardckpt.cli import main
from shardckpt.manager import remove_step
from tests.cli.checkpoints import damage
from tests.cli.trainer import make_trainer_steps
from tests.manager import folders

if TYPE_CHECKING:
    import pytest


def test_a_trainers_metrics_choose_its_best_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What transformers' Trainer has logged at a step is its metric: ls shows it, and --keep-best keeps the best."""
    make_trainer_steps(tmp_path, 100, 200, 300)
    assert main(["ls", str(tmp_path), "--json"]) == 0
    rows = {each["step"]: each["metrics"] for each in json.loads(capsys.readouterr().out)}
    assert rows[300] == {"eval_loss": 100.0, "loss": 1.0}
    assert main(["prune", str(tmp_path), "--keep-best", "eval_loss"]) == 0
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-200", "checkpoint-300"}


def test_a_trainers_steps_are_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As save_total_limit of transformers does, --keep-latest keeps the newest; a pin keeps one; ls shows the same."""
    make_trainer_steps(tmp_path, 100, 200, 300, 1000)
    damage(tmp_path / "checkpoint-300" / "model.safetensors", "cut by a byte")
    assert main(["pin", str(tmp_path), "100", "--label", "paper"]) == 0
    assert main(["ls", str(tmp_path)]) == 1
    assert "pinned as 'paper'" in capsys.readouterr().out
    for dry_run in (["--dry-run"], []):
        assert main(["prune", str(tmp_path), "--keep-latest", "1", "--json", *dry_run]) == 0
        steps = {each["step"]: each["kept"] for each in json.loads(capsys.readouterr().out)["steps"]}
        assert (steps[100], steps[200]) == ("pinned as 'paper'", "")
        assert steps[1000] == "it is the newest, among the newest 1"
        assert steps[300].startswith("damaged: model.safetensors")
        assert steps[300].endswith("--damaged says whether it may go")
        assert (tmp_path / "checkpoint-200").exists() == bool(dry_run)
    assert remove_step(tmp_path, 1000).kept == "it is the newest"


def test_the_newest_that_a_manager_loads_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside newer steps of the Hub's format the newest of a manager stays, which its next run loads."""
    folders.save_all(tmp_path, 1, 2, name="checkpoint-{}")
    make_trainer_steps(tmp_path, 3, 4)
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert "kept: it is the newest that a manager loads" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}


def test_what_no_policy_counts_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of torch.save, and a checkpoint by no step's name, are no steps to prune: the answer names them."""
    make_trainer_steps(tmp_path, 1, 2)
    folders.save(tmp_path, 7, name="final")
    (tmp_path / "step 2 (copy)").mkdir()
    (tmp_path / "step 2 (copy)" / "metadata.json").write_text("{}")
    for name in ("step_1.pt", "notes.pt"):
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert main(["prune", str(tmp_path), "--keep-latest", "1", "--dry-run"]) == 0
    left = "left, since no policy counts files, and directories of other names: final, step 2 (copy), step_1.pt"
    assert left in capsys.readouterr().out.splitlines()
    assert main(["prune", str(tmp_path), "--keep-latest", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["uncounted"] == [
        f"{tmp_path}/{name}" for name in ("final", "step 2 (copy)", "step_1.pt")
    ]
    assert (tmp_path / "step_1.pt").exists()


def test_steps_on_a_store_are_steps(tmp_path: Path) -> None:
    """There, too, a step of the Hub's format goes whole."""
    make_trainer_steps(tmp_path / "run", 1, 2)
    assert main(["prune", f"local://{tmp_path}/run", "--keep-latest", "1"]) == 0
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]


def test_what_no_verb_reads_stays_with_the_words_of_ls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step in a format that is known and not read is kept, and its row says what ls does."""
    make_trainer_steps(tmp_path, 1, 2)
    (tmp_path / "global_step5").mkdir()
    torch.save({"module": {"w": torch.ones(2)}}, tmp_path / "global_step5" / "mp_rank_00_model_states.pt")
    assert main(["prune", str(tmp_path), "--keep-latest", "1", "--dry-run"]) == 0
    assert "kept: a checkpoint of DeepSpeed without ZeRO partitions" in capsys.readouterr().out


def test_a_model_hides_no_steps_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that the Trainer has saved a model to, and its steps: ls says that there are more, and -r lists all."""
    run = tmp_path / "team" / "run"
    make_trainer_steps(run, 100, 200)
    save_file({"w": torch.ones(2)}, run / "model.safetensors", {"format": "pt"})
    (run / "config.json").write_text("{}")
    assert main(["ls", str(run.parent)]) == 0
    said = capsys.readouterr().out
    assert "whole: with 2 steps in its folders" in said
    assert "2 more in 1 folder, by the names of files: `shardckpt ls -r" in said
    assert main(["ls", "-r", "--json", str(run.parent)]) == 0
    rows = {each["name"]: each["nbytes"] for each in json.loads(capsys.readouterr().out)}
    assert [*rows] == ["run/checkpoint-100", "run/checkpoint-200", "run/."]
    assert rows["run/."] == sum(each.stat().st_size for each in run.iterdir() if each.is_file())
    assert main(["verify", str(run.parent)]) == 0
    assert "skipped: 1: run (with 2 steps in its folders)" in capsys.readouterr().out
    damage(run / "checkpoint-100" / "model.safetensors", "cut by a byte")
    assert main(["verify", str(run)]) == 1
    assert "3 checkpoints: " in capsys.readouterr().out
