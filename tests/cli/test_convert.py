from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

import shardckpt
from shardckpt.cli import main

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_convert_prints_the_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`convert SRC DST --to ...` has a line a tensor with both fingerprints, or all of it as JSON."""
    values = {"w": torch.arange(6.0), "step": 3}
    torch.save(values, tmp_path / "a.pt")
    mark = shardckpt.fingerprint({"w": values["w"]})["w"]
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "c"), "--to", "safetensors@1"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2].split() == ["w", "float32", "[6]", mark, mark]
    assert said[-1].endswith(
        "safetensors version 1, written from torch_save version 1: 1 tensors of 24 bytes, 0 objects; read again, all "
        "fingerprints are equal"
    )
    arguments = ["convert", str(tmp_path / "c"), str(tmp_path / "hf"), "--to", "hf", "--dtype", "bfloat16", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    (tensor,) = found["proof"]
    assert (tensor["dtype"], tensor["written_dtype"], found["left_out"]) == (
        "float32",
        "bfloat16",
        ["step", "content_metadata"],
    )
    assert tensor["before"] == tensor["after"] == shardckpt.fingerprint({"w": values["w"].bfloat16()})["w"]  # type: ignore[attr-defined]


def test_convert_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An error names what SRC is, and nothing is written."""
    (tmp_path / "a.pt").write_bytes(b"GGUF" + bytes(60))
    assert main(["convert", str(tmp_path / "a.pt"), str(tmp_path / "c")]) != 0
    assert "a.pt is a GGUF file" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
