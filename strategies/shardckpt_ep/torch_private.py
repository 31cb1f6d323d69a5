"""Every private name of torch that this package needs, in one place, with the reason."""

from __future__ import annotations

# The placement of a tensor axis that another mesh dimension has already sharded, as FSDP2 does inside experts.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
