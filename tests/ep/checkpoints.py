"""Checkpoints whose tensor of all experts is stored in any number of chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt import dist_checkpointing
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def store(path: Path, tensors: dict[str, torch.Tensor], pieces: int, dim: int, **others: Any) -> None:
    """Save, in one process, every tensor of two axes or more cut along one, into fewer pieces where it is shorter."""
    state: dict[str, Any] = dict(others)
    for key, value in tensors.items():
        parts = value.tensor_split(min(pieces, value.shape[dim]), dim) if value.dim() else [value]
        offset = [0] * value.dim()
        for number, part in enumerate(parts):
            state[f"{key}-{number}"] = _shard(key, part.contiguous(), value, tuple(offset))
            if value.dim():
                offset[dim] += part.shape[dim]
    dist_checkpointing.save(state, path)


def _shard(key: str, part: torch.Tensor, whole: torch.Tensor, offset: tuple[int, ...]) -> ShardedTensor:
    return ShardedTensor(key, part, part.dtype, tuple(part.shape), tuple(whole.shape), offset, None)
