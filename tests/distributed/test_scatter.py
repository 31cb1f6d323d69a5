"""A value for each rank, from the main rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from tests.ranks import Ranks


def _scatter(count: int) -> str:
    return Comm().scatter([f"for {rank}" for rank in range(count)] if dist.get_rank() == 0 else [])


def test_each_rank_gets_its_value(ranks: Ranks) -> None:
    """Rank n gets value n; one value too few is the same error on all; alone, the only value is one's own."""
    assert ranks.run(3, _scatter, 3) == ["for 0", "for 1", "for 2"]
    assert all("there are 2 values for 3 ranks" in each.message for each in ranks.outcomes(3, _scatter, 2))
    assert Comm(alone=True).scatter([7]) == 7
    with pytest.raises(CheckpointingException, match="there are 0 values for 1 ranks"):
        Comm(alone=True).scatter([])
