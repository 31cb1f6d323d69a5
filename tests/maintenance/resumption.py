"""What the tests of resumption share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path


MIB = 1 << 20


def make_source(folder: Path, *, is_checkpoint: bool) -> None:
    """8 MiB of tensors, and for a checkpoint objects and common state."""
    tensors = {f"w.{n}": torch.rand(MIB // 4) for n in range(6)} | {"long": torch.rand(MIB // 2 + 3)}
    tensors |= {f"v.{n}": torch.rand(100) for n in range(50)}
    if not is_checkpoint:
        folder.mkdir()
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
        return
    state: dict[str, Any] = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}
    dc.save({**state, "object": ShardedObject("object", {"a": 1}, (1,), (0,)), "step": 3}, folder, "torch_dist")


def read_files(place: Path) -> dict[str, bytes]:
    """The bytes of a file, or of the files in a folder."""
    if place.is_file():
        return {"": place.read_bytes()}
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def replace_id(files: dict[str, bytes], save_id: str) -> dict[str, bytes]:
    """The files that have no name of the save in them."""
    return {name: data for name, data in files.items() if not save_id or save_id.encode() not in data}


def get_save_id(place: Path) -> str:
    """The name of the save in a checkpoint of ours."""
    record = place / "shardckpt.json"
    return str(json.loads(record.read_bytes())["save_id"]) if place.is_dir() and record.exists() else ""


def assert_same_files(whole: Path, resumed: Path) -> None:
    """Compare all files but those that have the save's id."""
    first, second = read_files(whole), read_files(resumed)
    assert first.keys() == second.keys()
    same = replace_id(first, get_save_id(whole))
    assert sum(map(len, same.values())) > 8 * MIB
    assert same == replace_id(second, get_save_id(resumed))
