"""What many tests say of the ranks that run them, and of the states that they save."""

from __future__ import annotations

import torch.distributed as dist


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the world size, without a process group too."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
