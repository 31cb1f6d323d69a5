"""The private names of torch that this package uses, imported in one place, each with the reason."""

from __future__ import annotations

# Placement of a tensor axis that another mesh dimension shards as well: FSDP2 makes it where it shards the axis of the
# experts. torch exports no public name, and a plain Shard would order the rows of the ranks wrongly.
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["StridedShard"]
