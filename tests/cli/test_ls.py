"""``shardckpt ls``: one row a checkpoint, whoever wrote it, and whether it is whole."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.commit.claim import REMOVAL_IN_PROGRESS
from shardckpt.integrations.fsspec.folder import FsspecFolder
from shardckpt.manager import CheckpointConfig, CheckpointManager, list_checkpoints, listing
from shardckpt.manifest.names import CONTENT_KEY
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager, hookimpl
from tests.backends import Backend, both, both_in_proof
from tests.cli.checkpoints import GOLDEN, copy_golden, save_plain_dcp
from tests.commit import owners
from tests.manager import folders

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def _save(path: Path | str, step: int | None = None, overwrite: bool = False) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, path, step=step, overwrite=overwrite)


def _list(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the exit code and what --json says, by the name of the directory."""
    code = main(["ls", str(folder), "--json"])
    return code, {each["name"]: each for each in json.loads(capsys.readouterr().out)}


@both
def test_ls_lists_whole_and_damaged_checkpoints(
    backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row has step, size, strategy, writer and state, in the order of steps; 1 for a cut file, which is named."""
    _save(tmp_path / "b", step=9)
    _save(tmp_path / "step-10")
    assert main(["ls", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows[:2]] == [["b", "9"], ["step-10", "10"]]
    assert all(f"{backend.name}@1" in row and row[-1] == "whole" for row in rows[:2])
    assert " ".join(rows[2]).startswith("2 checkpoints, 2 whole")
    file = tmp_path / "b" / backend.data_file(0)
    size = file.stat().st_size
    os.truncate(file, size - 1)
    code, found = _list(tmp_path, capsys)
    assert code == 1
    assert found["b"]["state"] == "damaged"
    assert found["b"]["reason"] == f"{file.name} has {size - 1:,} bytes, {size:,} were written"
    assert found["step-10"]["writer"].startswith("shardckpt ")
    disk = sum(path.stat().st_size for path in (tmp_path / "step-10").iterdir())
    assert found["step-10"]["nbytes"] == disk
    assert list(found) == ["b", "step-10"]


def test_ls_recognises_what_others_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's, plain DCP's and the Hub's are checkpoints; logs and empty directories are none, and no fault."""
    copy_golden("0.16.1", tmp_path).rename(tmp_path / "iter_0001000")
    save_plain_dcp(tmp_path)
    (tmp_path / "hf").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "hf" / "model.safetensors")
    (tmp_path / "empty").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("x")
    code, found = _list(tmp_path, capsys)
    assert code == 0
    assert {name: (each["strategy"], each["state"]) for name, each in found.items()} == {
        "iter_0001000": ("torch_dist@1", "whole"),
        "dcp": ("torch_dist@1", "whole"),
        "hf": ("huggingface", "whole"),
        "empty": ("", "other"),
        "logs": ("", "other"),
    }
    assert found["iter_0001000"]["step"] == 1000
    assert found["logs"]["reason"] == "it has events"
    assert all(each["writer"] == "" for each in found.values())
    libraries = [found[name]["library"] for name in ("iter_0001000", "dcp", "hf")]
    assert libraries == ["Megatron-Core", "PyTorch DCP", "Hugging Face"]
    for name, library in zip(("iter_0001000", "dcp", "hf"), libraries, strict=True):
        assert main(["inspect", str(tmp_path / name)]) == 0
        assert capsys.readouterr().out.splitlines()[1].startswith(f"written by {library}, ")  # as ls says
    (tmp_path / "iter_0001000" / "__1_0.distcp").unlink()
    os.truncate(tmp_path / "hf" / "model.safetensors", 20)
    code, found = _list(tmp_path, capsys)
    assert code == 1
    assert "__1_0.distcp is missing" in found["iter_0001000"]["reason"]
    assert found["hf"]["state"] == "damaged"


def test_ls_names_torch_checkpointing(capsys: pytest.CaptureFixture[str]) -> None:
    """Directories of torch_checkpointing have its name as their writer, in the table, too."""
    code, found = _list(GOLDEN / "torch-checkpointing-0.1.1", capsys)
    assert code == 0
    assert {each["library"] for each in found.values()} == {"torch_checkpointing"}
    assert main(["ls", str(GOLDEN / "torch-checkpointing-0.1.1")]) == 0
    assert "another library" not in capsys.readouterr().out


def test_ls_recognises_deepspeed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """ZeRO and universal checkpoints have DeepSpeed's step; bad ones say why; verify takes the folder."""
    names = ["zero1", "zero2", "zero3", "bf16", "universal-zero1", "universal-zero3"]
    for name in names:
        shutil.copytree(GOLDEN / "deepspeed" / name, tmp_path / name)
    code, found = _list(tmp_path, capsys)
    assert code == 0
    assert {name: (each["strategy"], each["state"], each["step"]) for name, each in found.items()} == dict.fromkeys(
        names, ("deepspeed", "whole", 2)
    )
    sizes = [path.stat().st_size for path in (tmp_path / "universal-zero1").rglob("*") if path.is_file()]
    assert found["universal-zero1"]["nbytes"] == sum(sizes)
    assert _list(tmp_path / "zero2", capsys)[1]["zero2"]["state"] == "whole"
    assert main(["verify", str(tmp_path)]) == 0
    assert "6 checkpoints: 6 intact" in capsys.readouterr().out
    next((tmp_path / "zero1").glob("*rank_0_*optim_states.pt")).unlink()
    cut = tmp_path / "zero2" / "mp_rank_00_model_states.pt"
    os.truncate(cut, cut.stat().st_size - 9)
    (tmp_path / "zero3" / "layer_00-model_states.pt").touch()
    (tmp_path / "universal-zero1" / "zero" / "hidden.bias" / "fp32.pt").unlink()
    code, found = _list(tmp_path, capsys)
    assert code == 1
    assert {name: found[name]["state"] for name in names} == {
        "zero1": "damaged",
        "zero2": "damaged",
        "zero3": "unreadable",
        "bf16": "whole",
        "universal-zero1": "damaged",
        "universal-zero3": "whole",
    }
    assert "the file of rank 0" in found["zero1"]["reason"]
    assert cut.name in found["zero2"]["reason"]
    assert "pipeline parallelism" in found["zero3"]["reason"]
    assert "hidden.bias lacks fp32.pt" in found["universal-zero1"]["reason"]


def test_ls_and_verify_see_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files of torch.save, of any release, and of safetensors have rows; what is no state dict is no fault."""
    state = {"w": torch.ones(300), "epoch": 3}
    torch.save(state, tmp_path / "epoch_3.pt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(state, tmp_path / "cut.ckpt")
    os.truncate(tmp_path / "cut.ckpt", 900)
    save_file({"w": torch.ones(2)}, tmp_path / "adapter.safetensors")
    torch.save(torch.ones(2), tmp_path / "mask.pt")
    (tmp_path / "vocabulary.bin").write_bytes(b"words")
    (tmp_path / "notes.txt").write_text("x")
    code, found = _list(tmp_path, capsys)
    assert code == 1
    assert {name: (each["strategy"], each["state"]) for name, each in found.items()} == {
        "epoch_3.pt": ("torch_save", "whole"),
        "old.pth": ("torch_save", "whole"),
        "cut.ckpt": ("torch_save", "damaged"),
        "adapter.safetensors": ("safetensors file", "whole"),
        "mask.pt": ("torch_save", "other"),
        "vocabulary.bin": ("", "other"),
    }
    assert (found["epoch_3.pt"]["step"], found["epoch_3.pt"]["library"]) == (3, "torch.save")
    assert main(["ls", str(tmp_path / "old.pth")]) == 0  # nothing is looked for beside it
    shown = capsys.readouterr()
    assert shown.out.splitlines()[2].split()[0] == "old.pth"
    assert shown.out.splitlines()[-1].startswith("1 checkpoint, 1 whole")
    assert shown.err == ""
    assert main(["verify", str(tmp_path)]) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(str(tmp_path))]
    assert {row[0].rpartition("/")[2]: row[-1] for row in rows if row[0].endswith((".ckpt", ".pt"))} == {
        "cut.ckpt": "damaged",
        "epoch_3.pt": "digests",
    }


def test_ls_shows_a_link_as_what_it_leads_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Links to files of torch.save and safetensors have the rows of these files, under their own names."""
    blobs, folder = tmp_path / "blobs", tmp_path / "run"
    blobs.mkdir()
    folder.mkdir()
    torch.save({"w": torch.ones(300)}, blobs / "0f3a")
    save_file({"w": torch.ones(2)}, blobs / "77be")
    torch.save({"w": torch.ones(300)}, blobs / "cut")
    os.truncate(blobs / "cut", 900)
    for name, blob in (("latest.pt", "0f3a"), ("adapter.safetensors", "77be"), ("cut.pt", "cut"), ("gone.pt", "x")):
        (folder / name).symlink_to(f"../blobs/{blob}")
    code, found = _list(folder, capsys)
    assert code == 1
    assert {name: (each["strategy"], each["state"]) for name, each in found.items()} == {
        "latest.pt": ("torch_save", "whole"),
        "adapter.safetensors": ("safetensors file", "whole"),
        "cut.pt": ("torch_save", "damaged"),
    }
    assert found["latest.pt"]["nbytes"] == (blobs / "0f3a").stat().st_size
    assert str(tmp_path) not in found["cut.pt"]["reason"]


def test_ls_finds_lost_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has lost its records, and loads as another library's, is not whole if other files show that it had them."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, tmp_path / "step-1", "torch_dist")
    copy_golden("0.16.1", tmp_path).rename(tmp_path / "step-2")
    save_plain_dcp(tmp_path).rename(tmp_path / "step-3")
    for path in (*tmp_path.glob("*/metadata.json"), tmp_path / "step-1" / "shardckpt.json"):
        path.unlink()
    code, found = _list(tmp_path, capsys)
    assert code == 1
    assert [each["state"] for each in found.values()] == ["damaged", "damaged", "whole"]
    assert "shardckpt.json is missing" in found["step-1"]["reason"]
    assert main(["inspect", str(tmp_path / "step-1")]) == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("written by shardckpt, ")
    assert [(each["writer"], each["library"]) for each in found.values()] == [
        ("shardckpt", ""),
        ("", "PyTorch DCP"),
        ("", "PyTorch DCP"),
    ]
    assert "metadata.json is missing" in found["step-2"]["reason"]


def test_ls_shows_the_metrics_of_a_step_without_its_marker(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a step that lost metadata.json the record still says the metrics, the format and who wrote it."""
    content = {CONTENT_KEY: {"metrics": {"loss": 0.5}}}
    shards = {"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}
    dc.save(shards, tmp_path / "step-1", "torch_dist", content_metadata=content)
    (tmp_path / "step-1" / "metadata.json").unlink()
    code, found = _list(tmp_path, capsys)
    step = found["step-1"]
    assert (code, step["state"], step["metrics"], step["strategy"]) == (1, "damaged", {"loss": 0.5}, "torch_dist@1")


def test_ls_says_what_the_names_of_files_count_too_much(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of ls -r that are no checkpoints, or the same by a link, are said, and an empty step counts nowhere."""
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(2))}, tmp_path / "run" / "step-1")
    (tmp_path / "run" / "step-2").mkdir()
    (tmp_path / "run" / "a.bin").write_bytes(b"x")
    (tmp_path / "run" / "b.bin").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "step-1")
    assert main(["ls", str(tmp_path)]) == 0
    assert "a folder of 3 checkpoints" in capsys.readouterr().out
    assert main(["ls", "-r", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "; 2 more by the names of files: no checkpoint; 1 row of the same by another path" in said
    assert said.count("1 checkpoint, 1 whole") == 1


def test_ls_says_why_a_checkpoint_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No reader, a save that did not end, damaged JSON: each is a state of its own, and the exit code is 1."""
    for name, text in {"step-1": '{"sharded_backend": "others"}', "step-2": "{"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metadata.json").write_text(text)
    (tmp_path / "step-3").mkdir()
    (tmp_path / "step-3" / "__0_0.distcp").write_text("x")
    code, found = _list(tmp_path, capsys)
    assert code == 1
    assert [each["state"] for each in found.values()] == ["unreadable", "damaged", "incomplete"]
    assert "no installed plugin reads that backend" in found["step-1"]["reason"]
    assert "metadata.json is damaged" in found["step-2"]["reason"]
    assert all(str(tmp_path) not in each["reason"] for each in found.values())
    main(["ls", str(tmp_path)])
    rule = capsys.readouterr().out.splitlines()[1]
    assert len(rule.split()[-1]) <= 40 < max(len(each["reason"]) for each in found.values())  # a terminal's width


def test_ls_of_one_checkpoint_and_of_none(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint is listed itself; leftovers beside it are counted; 2 where there is no directory."""
    owners.leave(tmp_path / "c", owners.dead())
    code, found = _list(checkpoint, capsys)
    assert (code, list(found)) == (0, ["c"])
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 checkpoint, 1 whole" in shown
    assert "1 hidden directory of" in shown
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err


@pytest.mark.parametrize("recursive", [[], ["-r"]])
def test_ls_names_a_file_of_gguf(recursive: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has a row that says what it is, and that it is not read; beside checkpoints that is no fault."""
    _save(tmp_path / "step-1")
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF\3\0\0\0")
    assert main(["ls", str(tmp_path), *recursive]) == 0
    said = capsys.readouterr().out
    assert "no checkpoint: a GGUF file (llama.cpp)" in said
    assert "1 checkpoint, 1 whole" in said


def test_ls_of_several_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each has its table below its name, a metric of one is shown, and one that is not there hides no other."""
    for name, step in (("a", 1), ("b", 2)):
        folders.save(tmp_path / name, step, loss=0.5)
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    _save(tmp_path / "b" / "last")
    assert main(["ls", a, "-r", b, "--metric", "loss"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first.startswith(f"{a}:\n")
    assert "step-2" not in first
    assert second.startswith(f"{b}:\n")
    assert "2 checkpoints, 2 whole" in second
    assert main(["ls", a, f"{b}x", "--json"]) == 2
    out, err = capsys.readouterr()
    assert [each["path"] for each in json.loads(out)] == [f"{a}/step-1"]
    assert f"{b}x" in err
    assert main(["ls", a, b, "--metric", "los"]) == 2
    assert "did you mean loss?" in capsys.readouterr().err


def test_ls_shows_a_fingerprint_and_what_is_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal values have equal fingerprints whatever the strategy, others another; the sums are those of the rows."""
    for name, backend, value in (("a", "torch_dist", 1), ("b", "safetensors", 1), ("c", "torch_dist", 2)):
        state = {"w": ShardedTensor.from_rank_offsets("w", torch.full((1000,), float(value)))}
        dc.save(state, tmp_path / name, (backend, 1), fingerprints=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events").write_text("x" * 500)
    code, found = _list(tmp_path, capsys)
    prints = {name: each["fingerprint"] for name, each in found.items()}
    assert code == 0
    assert prints["a"] == prints["b"] != prints["c"]
    assert len(prints["a"]) == 32
    assert prints["logs"] == ""
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count(prints["a"][:12]) == 2
    assert shown.splitlines()[-1].startswith("on disk: ")
    assert shown.splitlines()[-1].endswith("no checkpoint 500 B")


class _Counted(FsspecFolder):
    """A folder in this process's memory that lists a tree by one request, as object stores do; counts requests."""

    requests: ClassVar[list[str]] = []

    def files(self) -> dict[str, int]:
        self.requests.append(f"files {self.url}")
        return super().files()

    def folders(self) -> list[str]:
        self.requests.append(f"folders {self.url}")
        return super().folders()

    def tree(self) -> dict[str, int]:
        self.requests.append(f"tree {self.url}")
        found = self._filesystem.find(self._root, detail=True)
        return {name.removeprefix(f"{self._root}/"): entry["size"] for name, entry in found.items()}

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        self.requests.append(f"read {self.url}/{name}")
        return super().read(name, offset, nbytes)


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[str]:
    """A URL of such folders."""

    class Plugin:
        @hookimpl(tryfirst=True)
        def shardckpt_filesystem(self, url: str) -> _Counted | None:
            if not url.startswith("counted://"):
                return None
            return _Counted(url, *fsspec.core.url_to_fs(url.replace("counted://", "memory://")))

    plugin = Plugin()
    get_plugin_manager().register(plugin)
    yield f"counted://{tmp_path.name}/run"
    get_plugin_manager().unregister(plugin)
    fsspec.filesystem("memory").store.clear()


def _find(url: str) -> str:
    """The path of a URL in the memory."""
    return f"/{url.partition('://')[2]}"


@both_in_proof
def test_ls_of_a_url_takes_few_requests(backend: Backend, counted: str) -> None:
    """One listing serves all folders: of those that are no checkpoint none is asked for, of others their JSON files."""
    for step in range(3):
        _save(f"{counted}/step-{step}")
    _save(f"{counted}/step-2", overwrite=True)
    for number in range(100):
        fsspec.filesystem("memory").pipe(f"{_find(counted)}/other-{number}/in/notes.txt", b"x")
    fsspec.filesystem("memory").pipe(f"{_find(counted)}/step-9/{backend.data_file(0)}", b"x")
    _Counted.requests.clear()
    found = {each.name: each for each in list_checkpoints(counted)}
    lists = [request for request in _Counted.requests if not request.startswith("read")]
    reads = [request for request in _Counted.requests if request.startswith("read")]
    assert len(lists) <= 6, lists
    assert len(reads) <= 3 * 3, reads
    assert [found[f"step-{step}"].state for step in range(3)] == ["whole"] * 3
    assert found["step-0"].nbytes > found["other-7"].nbytes == 1
    assert {each.state for each in found.values() if each.name.startswith("other")} == {"other"}


def test_ls_of_a_url_shows_the_age_of_managers_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in their records, which are read in any case: no request is made for it."""
    config = CheckpointConfig(folder=f"local://{tmp_path}/run", interval=1)
    with CheckpointManager(config, {"m": torch.nn.Linear(1, 1)}) as manager:
        manager.save(1)
    assert main(["ls", f"local://{tmp_path}/run"]) == 0
    header, _, row, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["checkpoint", "step", "age"]
    assert row.split()[:2] == ["step-1", "1"]


def test_an_interrupted_removal_is_finished_as_ls_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a checkpoint on a store whose removal was killed, ls names the call that removes the rest."""
    url = f"local://{tmp_path}/step-1"
    _save(url)
    (tmp_path / "step-1" / REMOVAL_IN_PROGRESS).touch()
    (tmp_path / "step-1" / "metadata.json").unlink()
    assert main(["ls", f"local://{tmp_path}"]) == 1
    said = capsys.readouterr().out
    assert "its removal is in progress, or was interrupted" in said
    assert f"`shardckpt prune {url}` finishes it" in said
    assert main(["prune", url]) == 0
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@both_in_proof
def test_ls_of_a_url_looks_again_at_what_has_changed(
    backend: Backend, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that another save replaces after the listing is not taken for a damaged one."""
    _save(f"{counted}/step-1")
    list_by_folder = listing.list_by_folder
    monkeypatch.setattr(listing, "list_by_folder", lambda place: _replace_after(list_by_folder(place), counted))
    (found,) = list_checkpoints(counted)
    assert (found.name, found.state) == ("step-1", "whole")


def _replace_after(found: Any, url: str) -> Any:
    fsspec.filesystem("memory").rm(f"{_find(url)}/step-1", recursive=True)
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(9)), "more": 1}, f"{url}/step-1")
    return found
