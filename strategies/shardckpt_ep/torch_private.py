"""The private names of torch that this package exports, each with the reason; no other module of it imports any."""

from __future__ import annotations

# The placement of FSDP2 where it shards the axis of the experts, which expert parallelism has sharded before, though
# its mesh dimension comes later. A plain Shard would give the ranks other rows. torch has no public name for it.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
