"""What the tests of diff share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt import dist_checkpointing
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def save_values(path: Path, values: dict[str, torch.Tensor], backend: str = "safetensors", **options: bool) -> None:
    """Save values as shards."""
    state = {key: ShardedTensor.from_rank_offsets(key, value) for key, value in values.items()}
    dist_checkpointing.save(state, path, backend, **options)
