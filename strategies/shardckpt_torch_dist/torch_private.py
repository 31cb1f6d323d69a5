"""The private names of torch that this package needs, each with the reason; no other module imports any."""

from __future__ import annotations

# Every ``.metadata`` names this class by its path: readers need exactly this one.
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

import shardckpt.distributed  # noqa: F401 - so that what DCP imports keeps no process group: see shardckpt.tensors.torch_private

__all__ = ["StorageInfo"]
