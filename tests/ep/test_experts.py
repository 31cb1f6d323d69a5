from __future__ import annotations

import pytest
import torch

from shardckpt.distributed import Comm
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.planning import Box
from shardckpt_ep import ExpertLayout
from shardckpt_ep.experts import Experts


def test_a_rank_outside_the_mesh_holds_no_shard() -> None:
    """A shard of an expert tensor on a rank that its layout puts outside the mesh is refused, of whatever box."""
    layout = ExpertLayout((4, 3), Box((0, 0), (4, 3)), inside=False)
    shard = ShardedTensor.from_rank_offsets("w1", torch.zeros(4, 3), replica_id=1)

    with pytest.raises(ShardingError, match=r"its layout has \[\] of \(4, 3\)"):
        Experts({"w1": layout}).check_shards([shard], Comm(alone=True))
