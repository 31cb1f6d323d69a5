"""torch's ShardedTensor as shards: several local shards, none, and one inside another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from tests.adapters.layouts import values
from tests.adapters.torch_sharded import MAKERS, SHAPE, local_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool, Ranks


def _save_and_load(kind: str, directory: Path) -> None:
    saved, empty = MAKERS[kind](values(SHAPE)), MAKERS[kind](torch.zeros(SHAPE, dtype=torch.float64))
    dist_checkpointing.save(to_sharded_state_dict({"w": saved}), directory)
    loaded = dist_checkpointing.load(to_sharded_state_dict({"w": empty}), directory, strict=True)
    assert loaded["w"] is empty
    assert all(torch.equal(a, b) for a, b in zip(local_tensors(empty), local_tensors(saved), strict=True))
    dist.barrier()


def _check(pool: RankPool, world: int, kind: str, directory: Path) -> None:
    pool.run(world, _save_and_load, kind, directory)
    assert torch.equal(dist_checkpointing.load_plain_tensors(directory)["w"], values(SHAPE))


def test_a_rank_may_have_several_shards_or_none(ranks: Ranks, tmp_path: Path) -> None:
    """Every local shard is a piece of the global tensor; a rank without any gets its ShardedTensor back as it is."""
    for world in (1, 3):
        _check(ranks, world, "rows", tmp_path / str(world))


def test_shards_inside_shards_lie_at_the_sum_of_their_offsets(ranks: Ranks, tmp_path: Path) -> None:
    """FSDP1 over tensor parallelism is stored as the global tensor, and filled again in place."""
    _check(ranks, 4, "nested", tmp_path / "nested")


def test_copies_in_other_groups_are_written_once(ranks: Ranks, tmp_path: Path) -> None:
    """Hybrid sharding has the tensor in several groups: the lowest rank writes each shard, all are filled."""
    _check(ranks, 4, "hybrid", tmp_path / "hybrid")
