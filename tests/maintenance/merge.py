"""What the tests of merge share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch


MIB = 1 << 20


LEAST = 32 * MIB


whole = ShardedTensor.from_rank_offsets  # a tensor in one shard


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    with dc.open_checkpoint(path) as checkpoint:
        return {key: checkpoint[key].read() for key in checkpoint}


def average(values: Sequence[torch.Tensor], weights: Sequence[float]) -> np.ndarray[Any, Any]:
    """The weighted average by numpy in float64, terms in ascending order, rounded once to float32."""
    terms = np.sort([np.float64(w) * v.double().numpy() for v, w in zip(values, weights, strict=True)], axis=0)
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return (total / math.fsum(weights)).astype(np.float32)
