"""Whose copy of a replicated shard is the main one, and which copies are not the same."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardckpt.mapping import ShardedTensor
from tests.validation.replicas import error_of, make_tensor

if TYPE_CHECKING:
    from tests.ranks import Ranks


def test_a_rank_that_cannot_read_its_copy_leaves_no_other_waiting(ranks: Ranks) -> None:
    """A tensor without memory fails the comparison on all ranks with the same error."""
    meta = ShardedTensor.from_rank_offsets("a", torch.empty(3, device="meta"), replicated=True)
    assert "has no memory of its own" in error_of(ranks, [[make_tensor("a", 1.0)], [meta]])
