"""What the tests of replicas share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardckpt.distributed.comm import Comm
from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.validation.replicas import choose_main_replicas

if TYPE_CHECKING:
    from shardckpt.mapping import Replicated, ShardedBase
    from tests.ranks import RankPool


def make_tensor(key: str, value: float, *, replicated: Replicated = True, count: int = 3) -> ShardedTensor:
    """A tensor that ranks hold in copies."""
    return ShardedTensor.from_rank_offsets(key, torch.full((count,), value), replicated=replicated)


def settle(shards: list[list[ShardedBase]], compare: bool) -> list[Any]:
    """The replica ids that each rank's own shards get."""
    return [shard.replica_id for shard in choose_main_replicas(shards[dist.get_rank()], Comm(), compare=compare)]


def outcomes_of(pool: RankPool, shards: list[list[ShardedBase]], *, compare: bool = True) -> list[Any]:
    """What came of the check on each rank."""
    return pool.outcomes(len(shards), settle, shards, compare)


def error_of(pool: RankPool, shards: list[list[ShardedBase]]) -> str:
    """The error that all ranks raise."""
    outcomes = outcomes_of(pool, shards)
    assert [outcome.kind for outcome in outcomes] == [ShardingError.__name__] * len(shards)
    assert len({outcome.message for outcome in outcomes}) == 1
    return outcomes[0].message
