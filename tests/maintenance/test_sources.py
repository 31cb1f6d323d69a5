from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

from shardckpt.cli import main
from shardckpt.errors import CannotLoadError, CorruptCheckpointError, NotACheckpointError, RefusedByPolicyError
from shardckpt.huggingface import torch_save_to_dcp
from shardckpt.maintenance import convert_checkpoint
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make_deepspeed_folder(path: Path) -> None:
    """A folder of DeepSpeed's steps."""
    path.mkdir()
    (path / "latest").write_text("global_step5")
    (path / "global_step5").mkdir()
    torch.save({"module": {}}, path / "global_step5" / "mp_rank_00_model_states.pt")


def make_script(path: Path) -> None:
    """A TorchScript archive."""
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


def make_folder_of_checkpoints(path: Path) -> None:
    """A folder with a Hugging Face folder in it."""
    (path / "step-5").mkdir(parents=True)
    safetensors.torch.save_file({"w": torch.ones(2)}, path / "step-5" / "model.safetensors")


def make_linked_steps(path: Path) -> None:
    """The same with a link to the newest."""
    make_folder_of_checkpoints(path)
    (path / "latest").symlink_to("step-5")


def make_run_of_torchtitan(path: Path) -> None:
    """A folder with a folder ``checkpoint``, in which the steps are."""
    make_folder_of_checkpoints(path / "checkpoint")


def make_legacy_megatron(path: Path) -> None:
    """An iteration that Megatron wrote with --ckpt-format torch."""
    (path / "mp_rank_00").mkdir(parents=True)
    torch.save({}, path / "mp_rank_00" / "model_optim_rng.pt")


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@table(
    ("make", "text"),
    [
        (make_deepspeed_folder, 'a folder of checkpoints: give one, such as the latest, "global_step5"'),
        (make_script, r"TorchScript archive.*state_dict\(\)"),
        (
            make_folder_of_checkpoints,
            'folder of 1 checkpoint: give one, such as "step-5"; `shardckpt ls -r .*` lists them',
        ),
        (make_linked_steps, 'a folder of checkpoints: give one, such as the latest, "step-5"'),
        (make_run_of_torchtitan, 'folder of 1 checkpoint: give one, such as "checkpoint/step-5"'),
        (
            make_legacy_megatron,
            r"legacy checkpoint of Megatron.* of 1 rank: .*convert .*mp_rank_00/model_optim_rng\.pt NEW`",
        ),
        (lambda path: np.savez(path.with_suffix(".npz"), w=np.ones(2)) or path.with_suffix(".npz").rename(path), "npz"),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "HDF5 file"),
        (lambda path: path.write_bytes(b"GGUF" + bytes(99)), "GGUF file"),
        (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda path: path.write_text(json.dumps({"w": 1})), "a JSON file"),
        (lambda path: path.write_bytes(b""), "an empty file"),
        (lambda path: path.write_bytes(bytes(50)), "begins with 50 zeros: it is damaged"),
        (lambda path: path.write_bytes(b"\x80\x04K\x01."), "of no format that is known here"),
        (lambda path: path.mkdir(), "empty directory"),
        (lambda _: None, "does not exist"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, make: Callable[[Path], object], text: str) -> None:
    """What no reader reads, whatever its name says, is an error that says what it is; nothing is written."""
    make(tmp_path / "model.safetensors")
    with pytest.raises((CannotLoadError, CorruptCheckpointError), match=text):
        convert_checkpoint(tmp_path / "model.safetensors", tmp_path / "new", "safetensors")
    assert not (tmp_path / "new").exists()


@table("save", [torch.save, safetensors.torch.save_file])
def test_a_cut_file_is_damaged(tmp_path: Path, save: Callable[[Any, Path], None]) -> None:
    """A file of torch.save or safetensors that is cut behind its first bytes is damaged, not of no format."""
    path = tmp_path / "a"
    save({"w": torch.ones(100)}, path)
    whole = path.read_bytes()
    for length in (len(whole) - 1, len(whole) // 2, 30):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptCheckpointError, match=r"cut short"):
            convert_checkpoint(path, tmp_path / "new", "dcp")
        assert main(["verify", str(path)]) == 1


def test_a_file_is_read_by_its_content(tmp_path: Path) -> None:
    """A safetensors file and a file of torch.save may have any name."""
    tensors = {"w": torch.arange(4.0), "v": torch.ones(2, 3, dtype=torch.bfloat16)}
    safetensors.torch.save_file(tensors, tmp_path / "a.pt")
    torch.save(tensors, tmp_path / "b.safetensors")
    found = [convert_checkpoint(tmp_path / name, tmp_path / f"{name}-hf", "hf") for name in ("a.pt", "b.safetensors")]
    assert [report.old for report in found] == [("huggingface", 1), ("torch_save", 1)]
    assert sorted(found[0].proof) == sorted(found[1].proof)
    read = [
        safetensors.torch.load_file(tmp_path / f"{name}-hf" / "model.safetensors") for name in ("a.pt", "b.safetensors")
    ]
    for one in read:
        assert all(torch.equal(one[key], tensor) for key, tensor in tensors.items())


def test_a_damaged_folder_is_not_taken_for_another_format(tmp_path: Path) -> None:
    """A Hugging Face folder whose file is cut short says so."""
    make_folder_of_checkpoints(tmp_path)
    file = tmp_path / "step-5" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors: its header is damaged, or the file is cut"):
        convert_checkpoint(tmp_path / "step-5", tmp_path / "new", "safetensors")
    with pytest.raises(NotACheckpointError):
        convert_checkpoint(tmp_path / "none", tmp_path / "new", "safetensors")


def test_the_job_says_what_may_be_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SHARDCKPT_ACCEPT holds for files of others, exports, merges and migrations; what is written is no source."""
    source, file = tmp_path / "source", tmp_path / "model.pt"
    torch.save({"w": torch.ones(2)}, file)
    assert main(["convert", str(file), str(source), "--to", "torch_dist"]) == 0
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "huggingface")
    new = str(tmp_path / "new")
    for backend, verb in [
        ("torch_save", ["convert", str(file), new, "--to", "safetensors"]),
        ("torch_dist", ["export", str(source), new]),
        ("torch_dist", ["merge", str(source), str(source), new]),
        ("torch_dist", ["migrate", str(source), new]),
    ]:
        assert main(verb) == 2, verb
        assert f"a '{backend}' checkpoint of version 1; SHARDCKPT_ACCEPT allows 'hugg" in capsys.readouterr().err, verb
    with pytest.raises(RefusedByPolicyError, match=r"'torch_save' .* SHARDCKPT_ACCEPT"):
        torch_save_to_dcp(file, new)
    monkeypatch.setenv("SHARDCKPT_ACCEPT", "torch_dist")
    assert main(["convert", str(source), new, "--to", "safetensors"]) == 0
    assert "SHARDCKPT_ACCEPT" not in capsys.readouterr().err


def test_what_lies_next_to_a_model_is_not_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link that leads nowhere, as of an editor's lock, and a folder with the suffix of a file are no errors."""
    model = tmp_path / "hf"
    model.mkdir()
    safetensors.torch.save_file({"w": torch.ones(2)}, model / "model.safetensors")
    (model / ".#config.json").symlink_to("user@host.1")
    (model / "epoch=3.ckpt").mkdir()
    for verb in (["verify", str(model)], ["inspect", str(model)], ["convert", str(model), str(tmp_path / "new")]):
        assert main(verb) == 0, capsys.readouterr().err


def test_a_snapshot_of_the_hubs_cache_may_have_other_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Weights in other formats, and a lost or foreign file of torch.save, keep no verb from a folder of links."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0f3a"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    weights = {"w": torch.ones(2)}
    safetensors.torch.save_file(weights, blobs / "1")
    torch.save(weights, blobs / "2")
    torch.save(weights, tmp_path / "foreign")
    links = {"model.safetensors": "1", "consolidated.safetensors": "1", "pytorch_model.bin": "2"}
    for name, blob in links.items():
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    assert main(["verify", "--json", str(snapshot)]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    files = {each["name"]: each["nbytes"] for each in report["files"]}
    assert files == {name: (snapshot / name).stat().st_size for name in links}
    (snapshot / "scheduler.pt").symlink_to("../../blobs/lost")
    (snapshot / "optimizer.pt").symlink_to(tmp_path / "foreign")
    assert main(["convert", str(snapshot), str(tmp_path / "new")]) == 0
    assert "are not read: optimizer.pt, pytorch_model.bin, scheduler.pt: convert" in caplog.text
    for verb in (["inspect", str(snapshot)], ["diff", str(snapshot), str(tmp_path / "new")], ["ls", str(tmp_path)]):
        assert main(verb) == 0, capsys.readouterr().err
    shutil.copytree(tmp_path / "models--a--b", tmp_path / "models--a--c", symlinks=True)
    other = tmp_path / "models--a--c" / "snapshots" / "0f3a"
    assert main(["diff", str(snapshot), str(other)]) == 0, capsys.readouterr().err
    assert "are not read: optimizer.pt, pytorch_model.bin, scheduler.pt" in capsys.readouterr().out
    assert main(["verify", str(snapshot)]) == 1
    said = capsys.readouterr().out
    assert "1 of 4 files without a fault were not opened" in said
    shown = {line.split()[0]: line for line in said.splitlines()}
    assert "not checked: it is a symbolic link" in shown["optimizer.pt"]  # no damage, which a prune may remove
    assert "cannot open" in shown["scheduler.pt"]
    (snapshot / "scheduler.pt").unlink()
    assert main(["verify", str(snapshot)]) == 0
    assert "intact by CRC-32 and structure without digests, links not opened" in capsys.readouterr().out
