"""The private names of torch that this room needs, with the reason; no other module of it imports any."""

from __future__ import annotations

# The pickle of every tensor that torch.save writes names these functions; our archives must name the same.
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor_v2
from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_v3

__all__ = ["rebuild_tensor_v2", "rebuild_tensor_v3"]
