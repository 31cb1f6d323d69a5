"""``shardckpt inspect`` and ``verify`` of what is no checkpoint: Hugging Face folders, and files."""

from __future__ import annotations

import json
import os
import shutil
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from shardckpt.archive import Archive
from shardckpt.cli import main
from tests.tables import table
from tests.tree import GOLDEN

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.storage import CheckpointReader


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder of two files and an index."""
    path = tmp_path / "hf"
    path.mkdir()
    files = {"a.w": "model-00001-of-00002.safetensors", "b.w": "model-00002-of-00002.safetensors"}
    save_file({"a.w": torch.ones(10, 4, dtype=torch.bfloat16)}, path / files["a.w"])
    save_file({"b.w": torch.ones(3)}, path / files["b.w"])
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return path


def test_a_folder_of_the_hub_is_inspected_and_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys, dtypes, shapes and files are shown; verify says that there are no digests, and what it has compared."""
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "'huggingface', version 1" in out
    assert ["a.w", "bfloat16", "10x4", "80"] in [line.split() for line in out.splitlines()]
    assert main(["inspect", str(folder), "--files"]) == 0
    assert ["model-00002-of-00002.safetensors", "84", "-", "1"] in [
        line.split() for line in capsys.readouterr().out.splitlines()
    ]
    assert main(["inspect", str(folder), "b.w[1:]", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == [1.0, 1.0]
    assert main(["verify", str(folder)]) == 0
    assert "intact by " in capsys.readouterr().out
    assert main(["verify", str(folder), "--require-digests"]) == 1


def test_files_are_in_json_if_they_are_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``inspect --files --json`` has a row for each file, with null for what is not known of it."""
    assert main(["inspect", str(folder), "--files", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert {"file": "model-00002-of-00002.safetensors", "bytes": 84, "rank": None, "items": 1} in files


@pytest.mark.parametrize("how", ["cut", "missing", "longer", "other tensor"])
def test_verify_names_the_bad_file_of_a_folder(folder: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A cut, missing, lengthened file, or one without a tensor of the index: exit code 1, and the others are fine."""
    file = folder / "model-00002-of-00002.safetensors"
    if how == "missing":
        file.unlink()
    elif how == "other tensor":
        save_file({"c.w": torch.ones(3)}, file)
    else:
        os.truncate(file, file.stat().st_size + (-1 if how == "cut" else 1))
    assert main(["verify", str(folder), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert {each["name"] for each in found["files"] if each["fault"]} == {file.name}
    assert len(found["files"]) == 3


@table("legacy", [False, True])
def test_a_file_of_torch_save_is_inspected_and_verified(
    tmp_path: Path, legacy: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tensors by their paths, and the other values; a cut file is damaged."""
    path = tmp_path / "model.pt"
    torch.save({"m": {"w": torch.ones(5, 5)}, "step": 4}, path, _use_new_zipfile_serialization=not legacy)
    assert main(["inspect", str(path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["m.w", "float32", "5x5", "100"] in rows
    assert ["step", "common"] in rows
    assert main(["verify", str(path)]) == 0
    assert "without digests" in capsys.readouterr().out
    os.truncate(path, path.stat().st_size - 5)
    assert main(["verify", str(path)]) == 1


def test_what_is_nothing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder and a file that are not read here are errors that say what they are."""
    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "notes.pt").write_text("x")
    for verb in ("inspect", "verify"):
        assert main([verb, str(tmp_path)]) == 2
        assert "a checkpoint of Orbax (JAX), which is not read here" in capsys.readouterr().err
        assert main([verb, str(tmp_path / "notes.pt")]) == 2
        assert "of no format that is known here" in capsys.readouterr().err


@table("kept", [-5, 100, 0.5])
def test_a_cut_file_is_called_the_same_by_every_verb(
    tmp_path: Path, kept: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """ls, verify, inspect and convert say one text of a file of torch.save that has lost its end."""
    path = tmp_path / "cut.pt"
    torch.save({"w": torch.ones(100)}, path)
    size = path.stat().st_size
    os.truncate(path, int(size * kept) if kept == 0.5 else kept % size)
    said = []
    for call, code in (("ls", 1), ("verify", 1), ("inspect", 2), ("convert", 2)):
        assert main([call, str(path), *[str(tmp_path / "new")] * (call == "convert")]) == code
        said.append(
            "".join(capsys.readouterr()).partition("a zip archive that is cut short or damaged: ")[2].split("\n")[0]
        )
    assert said[0]
    assert said == said[:1] * 4


def test_a_folder_of_torch_checkpointing_is_one_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its files of ranks are no checkpoints of their own for who counts what is in the folder around it."""
    step = tmp_path / "run" / "step-1"
    shutil.copytree(GOLDEN / "torch-checkpointing-0.1.1" / "mesh-4", step)
    assert main(["ls", str(tmp_path)]) == 0
    assert "a folder of 1 checkpoint" in capsys.readouterr().out


def test_a_trainers_optimizer_beside_a_model_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """`verify` compares it with its CRC-32, and `convert` says that it is not read; whose pickle it is is no matter."""
    folder = tmp_path / "checkpoint-1000"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    torch.save({"state": torch.ones(1000)}, folder / "optimizer.pt")
    torch.save(Fraction(1, 2), folder / "training_args.bin")
    (folder / "trainer_state.json").write_text("{}")
    assert main(["verify", str(folder)]) == 0
    assert "optimizer.pt" in capsys.readouterr().out
    assert main(["ls", str(folder)]) == 0
    assert main(["convert", str(folder), str(tmp_path / "new"), "--to", "hf"]) == 0
    assert not (tmp_path / "new" / "trainer_state.json").exists()  # the metrics of a training, without its optimizer
    assert "trainer_state.json is the training's, and is not copied" in caplog.text
    assert "2 files of torch.save next to the model are not read: optimizer.pt, training_args.bin" in caplog.text
    (folder / "optimizer.pt").write_bytes((folder / "optimizer.pt").read_bytes()[:-2000])
    assert main(["verify", str(folder)]) == 1
    assert "damaged: 1 of 3 files" in capsys.readouterr().out
    assert main(["ls", str(folder)]) == 1
    assert "damaged: optimizer.pt is" in capsys.readouterr().out


@pytest.mark.parametrize("many", [1, 2])
def test_a_folder_of_pickled_weights_is_one_checkpoint(
    many: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that transformers saved as .bin, in a file or several with their index, is read, and converted whole."""
    folder, new = tmp_path / "old", tmp_path / "new"
    folder.mkdir()
    files = ["pytorch_model.bin"] if many == 1 else [f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2)]
    weights = {"a.w": torch.ones(3), "b.w": torch.zeros(2, 2)}
    weight_map = dict(zip(weights, [*files, *files], strict=False))
    for file in files:
        torch.save({name: weights[name] for name in weights if weight_map[name] == file}, folder / file)
    if many > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    for verb in ("ls", "verify"):
        assert main([verb, str(folder), "--json"]) == 0
    assert main(["convert", str(folder), str(new), "--to", "hf"]) == 0
    assert {path.name for path in new.iterdir()} == {"config.json", "model.safetensors"}
    assert main(["diff", str(folder), str(new), "--tensors-only"]) == 0
    capsys.readouterr()
    (folder / files[-1]).write_bytes((folder / files[-1]).read_bytes()[:-500])
    for verb in ("ls", "verify"):
        assert main([verb, str(folder)]) == 1
        assert files[-1] in capsys.readouterr().out


def test_verify_reads_each_file_of_pickles_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are not compared with their CRC-32 once more as a file that stands with them."""
    for name in ("pytorch_model.bin", "optimizer.pt"):
        torch.save({"w": torch.ones(3)}, tmp_path / name)
    seen: list[str] = []
    check = Archive.check_members

    def count(archive: Archive, reader: CheckpointReader, name: str) -> None:
        seen.append(name)
        check(archive, reader, name)

    monkeypatch.setattr(Archive, "check_members", count)
    assert main(["verify", str(tmp_path)]) == 0
    assert sorted(seen) == ["optimizer.pt", "pytorch_model.bin"]


def test_the_index_of_pickled_weights_is_held_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that lacks a tensor which the index says is in it is damaged, and named."""
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model-00001-of-00001.bin")
    weight_map = dict.fromkeys(("a", "b"), "pytorch_model-00001-of-00001.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert main(["verify", str(tmp_path)]) == 1
    assert "does not have the tensors that the index names: b" in capsys.readouterr().out


def test_loose_files_beside_a_model_are_not_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file of the Hub's name among others is a file as they are; with a config it is a model, and has them all."""
    folder = tmp_path / "loose"
    folder.mkdir()
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    save_file({"w": torch.ones(4)}, folder / "ema.safetensors")
    torch.save({"w": torch.ones(1000)}, folder / "a.ckpt")
    (folder / "a.ckpt").write_bytes((folder / "a.ckpt").read_bytes()[:-2000])
    for call in (["ls", "-r", str(tmp_path)], ["ls", str(folder)], ["verify", "-r", str(tmp_path)]):
        assert main(call) == 1
        said = capsys.readouterr().out
        assert all(name in said for name in ("a.ckpt", "ema.safetensors", "model.safetensors"))
    (folder / "config.json").write_text("{}")
    torch.save({"w": torch.ones(4)}, folder / "old.pt", _use_new_zipfile_serialization=False)
    assert main(["ls", str(folder)]) == 1
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert all(name in said for name in ("a.ckpt", "ema.safetensors", "model.safetensors", "old.pt"))


def test_ls_and_verify_judge_a_file_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By what it begins with: empty and cut files are damaged if their names are those of checkpoints, else none."""
    damaged = {
        "empty.pt": b"",
        "empty.safetensors": b"",
        "cut.pt": b"PK\3",
        "0.pt": bytes(99),
    }
    for name, content in {**damaged, "empty.bin": b"", "page.pt": b"<html>"}.items():
        (tmp_path / name).write_bytes(content)
    save_file({}, tmp_path / "none.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "w.ckpt")
    assert main(["ls", str(tmp_path), "--json"]) == 1
    states = {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    codes = {name: main(["verify", str(tmp_path / name)]) for name in states}
    assert {name for name, code in codes.items() if code == 1} == {*damaged}
    assert states == {name: ("whole", "damaged", "other")[code] for name, code in codes.items()}
    capsys.readouterr()
    (tmp_path / "hub").mkdir()
    save_file({}, tmp_path / "hub" / "model.safetensors")
    assert (main(["ls", str(tmp_path / "hub")]), main(["verify", str(tmp_path / "hub")])) == (0, 0)
