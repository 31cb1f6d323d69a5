"""Checkpoints of (safetensors, 1) for tests, and their indexes as a vandal changes them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.storage import Columns, pack_columns
from shardckpt.testing.contract.rewriting import reseal
from shardckpt_safetensors import SafetensorsSaveShardedStrategy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ROWS = torch.arange(48.0).view(12, 4)
BIAS = torch.arange(7, dtype=torch.int16)


def make_state() -> dict[str, Any]:
    """Return a tensor in three pieces, an entire one, an object and common state."""
    pieces = [
        ShardedTensor("layers.0.weight", ROWS[low : low + 4].clone(), ROWS.dtype, (4, 4), (12, 4), (low, 0), None)
        for low in (0, 4, 8)
    ]
    return {
        "weight": pieces,
        "bias": ShardedTensor.from_rank_offsets("layers.0.bias", BIAS.clone()),
        "rng": ShardedObject("rng", {"seed": 3, "state": torch.ones(2)}, (1,), (0,)),
        "step": 5,
    }


def wanted_state() -> dict[str, Any]:
    """Return descriptions of what :func:`make_state` has, unsharded and without data."""
    return {
        "weight": ShardedTensor.from_global_shape("layers.0.weight", ROWS.dtype, tuple(ROWS.shape)),
        "bias": ShardedTensor.from_global_shape("layers.0.bias", BIAS.dtype, tuple(BIAS.shape)),
        "rng": ShardedObject("rng", None, (1,), (0,)),
    }


def save(path: Path, **options: Any) -> Path:
    """Save :func:`make_state`."""
    dc.save(make_state(), path, SafetensorsSaveShardedStrategy(**options))
    return path


def change_index(
    path: Path,
    columns: Callable[[dict[str, torch.Tensor]], None] = lambda _: None,
    header: Callable[[dict[str, Any]], None] = lambda _: None,
) -> None:
    """Change the columns, and the JSON, of a checkpoint's index, and make right digests."""
    file = path / "index.safetensors"
    found = Columns(bytearray(file.read_bytes()), "index")
    names = (
        *("text", "text_end", "file", "tensor", "tensor_dtype", "tensor_axes", "tensor_shape", "tensor_end"),
        *("box_offset", "box_extent", "box_file", "box_start", "alias", "alias_tensor"),
        *("object", "object_codec", "object_file", "object_start", "object_nbytes"),
    )
    table = {name: found.integers(name).clone() for name in names}
    columns(table)
    text = json.loads(found.metadata["shardckpt"])
    header(text)
    file.write_bytes(pack_columns(table, {"shardckpt": json.dumps(text)}))
    reseal(str(path))
