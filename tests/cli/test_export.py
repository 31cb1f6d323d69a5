from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.cli import main
from tests.huggingface.samples import read, save

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_the_command_exports_with_every_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`shardckpt export` has the function's arguments, and prints a row for every file."""
    experts = torch.arange(2 * 4 * 3.0).reshape(2, 4, 3)
    state = {"net.model.layers.0.mlp.experts.gate_up_proj": experts, "net.head": torch.ones(2), "other": torch.ones(1)}
    save(tmp_path / "c", state)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text("{}")
    options = ["--prefix", "net.", "--mapping", "qwen3_moe", "--dtype", "bfloat16", "--max-shard-size", "24"]
    options += ["--assets", str(tmp_path / "assets"), "--leave-out", "head"]
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "hf"), *options, "--verbose"]) == 0
    *rows, summary = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["model-00001-of-00002.safetensors", "2", "24"] in rows
    assert summary[1:6] == ["2", "files", "of", "4", "tensors,"]
    found = read(tmp_path / "hf")
    assert len(found) == 4
    up = found["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert torch.equal(up, experts[1, 2:].bfloat16())
    assert (tmp_path / "hf" / "config.json").is_file()
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "hf"), "--format", "bin"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shardckpt export: ")
    assert "is not empty" in error
    assert main(["export", str(tmp_path / "c"), str(tmp_path / "hf"), "--format", "bin", "--overwrite"]) == 0
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "pytorch_model.bin"]


def test_a_file_is_exported_as_conversions_write_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To a directory and to a store; --format bin names the two calls that write it."""
    torch.save({"model": {"layer.weight": torch.ones(2, 3)}}, tmp_path / "last.ckpt")
    store = f"local://{tmp_path}/store/hf"
    for target in (str(tmp_path / "hf"), store):
        assert main(["export", str(tmp_path / "last.ckpt"), target, "--dtype", "bfloat16"]) == 0
        assert "read again, all fingerprints are equal" in capsys.readouterr().out
    written = read(tmp_path / "hf")
    assert [(value.dtype, value.sum()) for value in written.values()] == [(torch.bfloat16, 6)]
    assert main(["convert", store, str(tmp_path / "back"), "--to", "hf"]) == 0
    assert read(tmp_path / "back").keys() == written.keys()
    assert main(["export", str(tmp_path / "last.ckpt"), str(tmp_path / "bin"), "--format", "bin"]) == 2
    assert f"`shardckpt export NEW {tmp_path}/bin --format bin`" in capsys.readouterr().err
