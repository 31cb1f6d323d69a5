"""One folder, whichever door writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.huggingface import export_to_huggingface, get_shard_info, save_state_dict
from shardckpt.maintenance import convert_checkpoint
from shardckpt_safetensors import SafetensorsSaveShardedStrategy
from tests.huggingface.samples import sharded_state
from tests.tables import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

#: Full pages, sizes of 64 bytes, odd ones, wide and narrow elements: what decides on the places in a file.
TENSORS = {
    "layers.2.w": torch.randn(256, 128),
    "layers.2.norm": torch.randn(16),
    "layers.10.half": torch.randn(512, 128).bfloat16(),
    "layers.10.odd": torch.randn(7, 3, dtype=torch.float64),
    "layers.10.tiny": torch.tensor([True, False, True]),
    "layers.11.bias": torch.randn(5).bfloat16(),
    "tail": torch.arange(3),
}
LIMIT = 256 << 10


def _export(folder: Path) -> Path:
    dc.save(sharded_state(TENSORS), folder / "c")
    export_to_huggingface(folder / "c", folder / "hf", max_shard_size=LIMIT)
    return folder / "hf"


def _convert(folder: Path) -> Path:
    dc.save(sharded_state(TENSORS), folder / "c", "torch_dist")
    convert_checkpoint(folder / "c", folder / "hf", "hf", max_shard_size=LIMIT)
    return folder / "hf"


def _save_contiguous(folder: Path) -> Path:
    dc.save(
        sharded_state(TENSORS), folder / "c", SafetensorsSaveShardedStrategy(layout="contiguous", max_shard_size=LIMIT)
    )
    return folder / "c"


def _save_weights(folder: Path) -> Path:
    _, _, files = get_shard_info(TENSORS, shard_size=LIMIT)
    folder.mkdir(exist_ok=True)
    for name in set(files.values()):
        save_state_dict({key: TENSORS[key] for key, file in files.items() if file == name}, folder / name)
    return folder


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("model*.safetensors")}


@table("door", [_convert, _save_contiguous, _save_weights], ids=["convert", "layout=contiguous", "save_state_dict"])
def test_every_door_writes_the_same_bytes(tmp_path: Path, door: Callable[[Path], Path]) -> None:
    """The files of weights of an export, a conversion, a save of contiguous tensors and a state dict do not differ."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    expected = _files(_export(tmp_path / "a"))
    assert sorted(expected) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert _files(door(tmp_path / "b")) == expected
