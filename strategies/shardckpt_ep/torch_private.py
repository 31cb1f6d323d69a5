"""The private names of torch that this package exports, each with the reason; no other module of it imports any."""

from __future__ import annotations

# FSDP2's placement for the axis of the experts: expert parallelism shards that axis first, although its mesh
# dimension comes after FSDP's. A plain Shard would give the ranks other rows. torch has no public name for it.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
