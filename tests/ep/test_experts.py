from __future__ import annotations

import numpy as np
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


def test_an_array_of_experts_is_not_one_ranks() -> None:
    """An array in the place of a parameter or of its state would be stored of one rank: it is refused, by its key."""
    experts = Experts({"layers.0.w1": ExpertLayout((4, 3), Box((0, 0), (2, 3)))})
    for key in ("layers.0.w1", "layers.1.w1", "state.layers.0.w1.exp_avg"):
        with pytest.raises(ShardingError, match=rf"'{key}' is an expert's and a ndarray, no tensor"):
            experts.layout_of(key, np.zeros((2, 3)))
    assert experts.layout_of("head", np.zeros((2, 3))) is None
    assert experts.layout_of("state.layers.0.w1.step", np.float32(3)) is None


def test_one_layout_by_hand_makes_no_tied_parameters() -> None:
    """Parameters of one shape may be given one layout object: one that an optimizer's state lacks is missing."""
    layout = ExpertLayout((4, 3), Box((0, 0), (2, 3)))
    experts = Experts({"experts.w1": layout, "experts.w3": layout})
    assert experts.find_missing(["state.experts.w1.exp_avg"]) == ["experts.w3"]
