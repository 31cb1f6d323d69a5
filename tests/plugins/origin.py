"""What the tests of origin share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardckpt.mapping import ShardedTensor


def state() -> dict[str, Any]:
    """A tensor that all ranks share."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return {"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, rank, world))}
