"""What the tests of inspect share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedObject, ShardedTensor

if TYPE_CHECKING:
    from pathlib import Path


def make_varied(folder: Path, backend: str = "safetensors") -> None:
    """Save a checkpoint with tensors of several ranks of shape and dtypes, tied ones, objects and common state."""
    tied = torch.ones(4, dtype=torch.bfloat16)
    tensors = {
        "m.a": torch.ones(2, 3),
        "m.scalar": torch.tensor(1),
        "m.empty": torch.ones(0, 5),
        "m.bits": torch.ones(7, dtype=torch.bool),
        "head": tied,
        "embed": tied,
        "ä.ö": torch.ones(1, dtype=torch.complex64),
    }
    state: dict[str, Any] = {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}
    state |= {"o": ShardedObject("rng/x", {"seed": 1}, (1,), (0,)), "iteration": 3, "args": {"lr": 1.0, "n": [1]}}
    dc.save(state, folder, (backend, 1), step=4)
