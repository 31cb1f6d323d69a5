"""Verbs on the steps of transformers' Trainer."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardckpt.cli import main
from tests.cli.checkpoints import damage
from tests.cli.trainer import make_trainer_steps

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("what", ["a step", "a folder of the Hub", "an adapter"])
def test_a_model_that_has_lost_its_weights_is_damaged(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files that are saved with weights show that there were some: each verb says so, and none calls it whole."""
    if what == "a step":
        make_trainer_steps(tmp_path, 100, 200)
        path = tmp_path / "checkpoint-100"
        (path / "model.safetensors").unlink()
    else:
        path = tmp_path / "model"
        path.mkdir()
        names = ("config.json", "generation_config.json") if what == "a folder of the Hub" else ("adapter_config.json",)
        for name in (*names, "tokenizer.json", "README.md"):
            (path / name).write_text("{}")
    for call in (["ls"], ["ls", "-r"], ["verify"], ["verify", "-r"]):
        for place in (path, tmp_path):
            assert main([*call, str(place)]) == 1
            assert "damaged: has lost its weights" in "".join(capsys.readouterr())
    for call in (["inspect"], ["convert"]):
        assert main([*call, str(path), *[str(tmp_path / "new")] * (call == ["convert"])]) == 2
        assert "has lost its weights" in capsys.readouterr().err


@pytest.mark.parametrize("lost", ["model.safetensors", "trainer_state.json"])
def test_a_step_without_its_model_or_its_end_takes_no_whole_steps_place(tmp_path: Path, lost: str) -> None:
    """Prune keeps the newest whole step beside one without weights, or without the file that is written last."""
    make_trainer_steps(tmp_path, 100, 200, 300)
    (tmp_path / "checkpoint-300" / lost).unlink()
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-200", "checkpoint-300"}


def test_an_unfinished_step_is_no_whole_one_for_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step without the file that the Trainer writes last is a fault for verify, as it is for ls."""
    make_trainer_steps(tmp_path, 100)
    (tmp_path / "checkpoint-100" / "trainer_state.json").unlink()
    for verb in ("ls", "verify"):
        assert main([verb, str(tmp_path)]) == 1
        assert "is missing, which transformers' Trainer writes last: the save did not end" in capsys.readouterr().out


def test_a_step_without_its_optimizer_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is whole, as save_only_model=True leaves it, and no resume: ls and verify say what a resume would lack."""
    make_trainer_steps(tmp_path, 100, 200)
    (tmp_path / "checkpoint-200" / "optimizer.pt").unlink()
    said = "the model only, without optimizer.pt: a resume begins with a new optimizer"
    assert main(["ls", str(tmp_path)]) == 0
    assert next(line for line in capsys.readouterr().out.splitlines() if said in line).startswith("checkpoint-200")
    assert main(["verify", str(tmp_path / "checkpoint-200")]) == 0
    assert said in capsys.readouterr().out


def test_a_trainers_step_is_inspected_with_its_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inspect has the step and the metrics that ls has, and names the files that it does not read."""
    make_trainer_steps(tmp_path, 100)
    path = str(tmp_path / "checkpoint-100")
    assert main(["inspect", path]) == 0
    out = capsys.readouterr().out
    assert "step 100, eval_loss 100, loss 1" in out
    assert "4 files of torch.save next to the model are not read: optimizer.pt, rng_state.pth, scheduler.pt, tra" in out
    assert main(["inspect", path, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["metrics"]) == (100, {"eval_loss": 100.0, "loss": 1.0})
    assert found["unread_files"] == dict.fromkeys(
        ["optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"], ""
    )


def test_a_cut_optimizer_is_seen_by_every_verb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """What ls and verify call damaged is no whole step for inspect, and convert says that it leaves damage behind."""
    make_trainer_steps(tmp_path, 100)
    file = tmp_path / "checkpoint-100" / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-200])
    for verb in ("ls", "verify", "inspect"):
        assert main([verb, str(tmp_path / "checkpoint-100")]) == 1
        assert "is a zip archive that is cut short" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "checkpoint-100"), str(tmp_path / "new")]) == 0
    assert "not read: optimizer.pt (damaged), rng_state.pth" in caplog.text


def test_merge_names_the_files_that_it_does_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of each source the files of torch.save are named: the merge has no optimizer."""
    make_trainer_steps(tmp_path, 100, 200)
    paths = [str(tmp_path / f"checkpoint-{step}") for step in (100, 200)]
    assert main(["merge", *paths, str(tmp_path / "new")]) == 0
    for path in paths:
        assert f"{path}: 4 files of torch.save next to the model are not read: optimizer.pt" in caplog.text


def test_diff_names_the_files_that_it_does_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal models say nothing of the optimizers beside them, whose files differ where their bytes do."""
    make_trainer_steps(tmp_path / "one", 100)
    make_trainer_steps(tmp_path / "other", 100)
    paths = [str(tmp_path / run / "checkpoint-100") for run in ("one", "other")]
    assert main(["diff", *paths]) == 0
    assert "4 files of torch.save next to the model are not read: optimizer.pt" in capsys.readouterr().out
    assert main(["diff", *paths, "--json"]) == 0
    assert next(iter(json.loads(capsys.readouterr().out)["unread_files"])) == "optimizer.pt"
    damage(tmp_path / "other" / "checkpoint-100" / "optimizer.pt", "flipped")
    assert main(["diff", *paths, "--tensors-only"]) == 0
    capsys.readouterr()
    assert main(["diff", *paths]) == 1
    assert "those in both whose bytes differ: optimizer.pt: diff each" in capsys.readouterr().out


def _make_sharded_steps(folder: Path, *steps: int) -> None:
    """Steps of a Trainer whose model and optimizer FSDP has saved in folders of their own."""
    make_trainer_steps(folder, *steps)
    for step in steps:
        place = folder / f"checkpoint-{step}"
        for name in ("model.safetensors", "optimizer.pt"):
            (place / name).unlink()
        for name in ("pytorch_model_fsdp_0", "optimizer_0"):
            dcp.save({"w": torch.full((2,), float(step))}, checkpoint_id=place / name)


def test_a_sharded_step_of_a_trainer_is_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step whose model FSDP has saved in a folder of the step is a row of ls, verified as a whole, and pruned."""
    _make_sharded_steps(tmp_path, 100, 200)
    for call in (["ls"], ["ls", "-r"]):
        assert main([*call, str(tmp_path), "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [(row["step"], row["state"], row["metrics"]["eval_loss"]) for row in rows] == [
            (100, "whole", 100.0),
            (200, "whole", 0.0),
        ]
        assert rows[0]["reason"] == "its model is in pytorch_model_fsdp_0"
    assert main(["verify", str(tmp_path / "checkpoint-100")]) == 0
    assert "optimizer_0/__0_0.distcp" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "checkpoint-100")]) == 2
    assert "read by their paths: pytorch_model_fsdp_0, optimizer_0" in capsys.readouterr().err
    assert main(["prune", str(tmp_path), "--keep-best", "eval_loss"]) == 0
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-200"]


def test_a_sharded_step_on_a_store_is_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Folders below a URL are seen as those of a directory: no step is taken for one that has lost its weights."""
    _make_sharded_steps(tmp_path, 100, 200)
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.put(str(tmp_path), "/trainer", recursive=True)
    for verb in ("ls", "verify"):
        assert main([verb, "memory://trainer", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)) == 2
    assert main(["prune", "memory://trainer", "--damaged", "--keep-latest", "1"]) == 0
    assert {path.split("/")[2] for path in store.find("/trainer")} == {"checkpoint-200"}
    store.store.clear()


def test_a_sharded_step_of_accelerate_is_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What Accelerator.save_state leaves under FSDP is one checkpoint: its random numbers show whose it is."""
    _make_sharded_steps(tmp_path, 100)
    place = tmp_path / "checkpoint-100"
    (place / "rng_state.pth").rename(place / "random_states_0.pkl")
    for name in ("trainer_state.json", "training_args.bin"):
        (place / name).unlink()
    place.rename(tmp_path / "checkpoint_0")
    assert main(["ls", str(tmp_path), "--json"]) == 0
    assert [(row["step"], row["state"]) for row in json.loads(capsys.readouterr().out)] == [(0, "whole")]


@pytest.mark.parametrize("lost", ["pytorch_model_fsdp_0", "optimizer_0/__0_0.distcp", "trainer_state.json"])
def test_a_part_of_a_sharded_step_is_missed(lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A step is as whole as each of its parts: ls and verify name what is missing, and prune counts the step before."""
    _make_sharded_steps(tmp_path, 100, 200)
    path = tmp_path / "checkpoint-200" / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    for verb in ("ls", "verify"):
        assert main([verb, str(tmp_path)]) == 1
        assert path.name in capsys.readouterr().out
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert (tmp_path / "checkpoint-100").exists()
