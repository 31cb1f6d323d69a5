"""The private names of torch that this package needs, each with the reason; no other module imports any."""

from __future__ import annotations

# The pickle of every tensor that torch.save writes names these functions; our archives must name the same.
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor_v2
from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_v3

# Every ``.metadata`` names this class by its path: readers need exactly this one.
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

import shardckpt.distributed  # noqa: F401 - so that what DCP imports keeps no process group: see shardckpt.tensors.torch_private

__all__ = ["StorageInfo", "rebuild_tensor_v2", "rebuild_tensor_v3"]
