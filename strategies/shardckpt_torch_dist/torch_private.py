"""The private names of torch that this package needs, each with the reason; no other module imports any."""

from __future__ import annotations

from typing import Any

from shardckpt.distributed import Comm  # noqa: F401 - DCP then keeps no process group: see tensors.torch_private

# isort: split
# Every ``.metadata`` names this class by its path: readers need exactly this one.
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo


def caches_plans(planner: Any) -> bool:
    """Return whether a save planner was made with ``enable_plan_caching=True``, which DCP keeps under this name."""
    return bool(getattr(planner, "_enable_plan_caching", False))


__all__ = ["StorageInfo", "caches_plans"]
