"""Every private name of torch that this package needs, in one place, with the reason."""

from __future__ import annotations

# The placement by which torch says that another mesh dimension has cut the same axis first, as FSDP2 does over experts.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
