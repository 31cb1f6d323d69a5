"""What is left of a damaged checkpoint is written, and what is not is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import main
from shardckpt.mapping import ShardedTensor
from tests.damage import flip
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KEYS = tuple(f"model.{letter}" for letter in "abcd")


def _values() -> dict[str, torch.Tensor]:
    return {key: torch.full((64, 64), float(number + 1)) for number, key in enumerate(KEYS)}


def _save(path: Path, backend: str) -> None:
    dc.save({key: ShardedTensor.from_rank_offsets(key, value) for key, value in _values().items()}, path, backend)


def _flip_value(path: Path, value: float) -> None:
    """Change a byte amid the values of a tensor, of whichever file of a checkpoint has them."""
    raw = torch.full((64,), value).numpy().tobytes()
    (file,) = [file for file in path.rglob("*") if file.is_file() and raw in file.read_bytes()]
    flip(file, file.read_bytes().index(raw) + 32)


@table("verb, backend", [("convert", "torch_dist"), ("export", "torch_dist"), ("merge", "safetensors")])
def test_a_damaged_record_costs_its_tensor_alone(
    tmp_path: Path, verb: str, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With --skip-damaged one flipped bit costs one tensor: the rest is written, it is named, and the code is 1."""
    _save(tmp_path / "a", backend)
    _flip_value(tmp_path / "a", 2.0)
    sources = ["a", "a"] if verb == "merge" else ["a"]
    call = [verb, *(str(tmp_path / name) for name in (*sources, "hf")), *([] if verb == "export" else ["--to", "hf"])]
    assert main(call) == 2
    assert "--skip-damaged" in capsys.readouterr().err
    assert main([*call, "--skip-damaged", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    damaged = found["conversion"]["damaged"] if verb == "merge" else found["damaged"]
    assert damaged == ([f"{tmp_path / 'a'}: model.b"] * 2 if verb == "merge" else ["model.b"])
    written = load_file(tmp_path / "hf" / "model.safetensors")
    assert {name.removeprefix("model."): value[0, 0].item() for name, value in written.items()} == {
        "a": 1.0,
        "c": 3.0,
        "d": 4.0,
    }


def test_a_missing_file_costs_what_was_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A Hub folder without one of its files, and one with a cut file, give what they have."""
    values = _values()
    (tmp_path / "hf").mkdir()
    weight_map = {}
    for number, key in enumerate(KEYS):
        file = f"model-0000{number // 2 + 1}-of-00002.safetensors"
        weight_map[key] = file
    for file in set(weight_map.values()):
        save_file({key: values[key] for key in KEYS if weight_map[key] == file}, tmp_path / "hf" / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    call = ["convert", str(tmp_path / "hf"), str(tmp_path / "c"), "--to", "safetensors", "--overwrite"]
    second = tmp_path / "hf" / weight_map[KEYS[-1]]
    second.write_bytes(second.read_bytes()[:-100])
    for lost in ([KEYS[3]], [KEYS[2], KEYS[3]]):
        assert main(call) == 2
        assert "--skip-damaged" in capsys.readouterr().err
        assert main([*call, "--skip-damaged"]) == 1
        said = capsys.readouterr().out
        assert f"damaged, and left out: {len(lost)} " in said
        assert all(key in said for key in lost)
        assert sorted(dc.load_sharded_metadata(tmp_path / "c")) == [key for key in KEYS if key not in lost]
        second.unlink(missing_ok=True)


def test_a_sound_source_is_written_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--skip-damaged of a sound checkpoint is a conversion like any other: exit code 0, nothing named."""
    _save(tmp_path / "a", "torch_dist")
    assert main(["convert", str(tmp_path / "a"), str(tmp_path / "c"), "--to", "safetensors", "--skip-damaged"]) == 0
    assert "damaged" not in capsys.readouterr().out
