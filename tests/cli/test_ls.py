"""``shardckpt ls``: one row a checkpoint, whoever wrote it, and whether it is whole."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.mapping import ShardedTensor
from tests.backends import Backend, both
from tests.cli.checkpoints import copy_golden, save_plain_dcp
from tests.commit import owners

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def _save(path: Path, step: int | None = None) -> None:
    dc.save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(1000))}, path, step=step)


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
    (tmp_path / "iter_0001000" / "__1_0.distcp").unlink()
    os.truncate(tmp_path / "hf" / "model.safetensors", 20)
    code, found = _list(tmp_path, capsys)
    assert code == 1
    assert "__1_0.distcp is missing" in found["iter_0001000"]["reason"]
    assert found["hf"]["state"] == "damaged"


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
    assert "metadata.json is missing" in found["step-2"]["reason"]


def test_ls_says_why_a_checkpoint_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No reader, a save that did not end, damaged JSON: each is a state of its own, and the exit code is 1."""
    for name, text in {"step-1": '{"sharded_backend": "tensorstore"}', "step-2": "{"}.items():
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


def test_ls_of_one_checkpoint_and_of_none(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint is listed itself; leftovers beside it are counted; 2 where there is no directory."""
    owners.leave(tmp_path / "c", owners.dead())
    code, found = _list(checkpoint, capsys)
    assert (code, list(found)) == (0, ["c"])
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "1 checkpoints, 1 whole" in shown
    assert "1 hidden directories" in shown
    assert main(["ls", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err


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
