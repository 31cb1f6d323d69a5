"""torch's ShardedTensor as shards: several local shards, none, and one inside another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

from shardckpt import dist_checkpointing
from shardckpt.adapters import to_sharded_state_dict
from tests.adapters.layouts import values

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool, Ranks

SHAPE = (8, 6)


def _made(boxes: list[tuple[int, int, int, int]], whole: torch.Tensor, group: Any = None) -> Any:
    """A ShardedTensor of which this rank has rows and columns ``(r, c, height, width)`` of the whole."""
    shards = [
        Shard.from_tensor_and_offsets(whole[r : r + h, c : c + w].clone(), [r, c], dist.get_rank())
        for r, c, h, w in boxes
    ]
    return init_from_local_shards(shards, *whole.shape, process_group=group)


def _rows(whole: torch.Tensor) -> Any:
    """Two bands of rows a rank, and none on the last of three ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    owners = max(world - 1, 1)
    height = SHAPE[0] // (2 * owners)
    mine = [(band * height, 0, height, SHAPE[1]) for band in range(2 * owners) if band % owners == rank]
    return _made(mine if rank < owners else [], whole)


def _nested(whole: torch.Tensor) -> Any:
    """FSDP1 over tensor parallelism: ranks (0, 1) and (2, 3) are tensor parallel, (0, 2) and (1, 3) data parallel.

    Columns are cut first; the columns of a rank are a tensor of which the data-parallel ranks have the rows.
    """
    rank = dist.get_rank()
    columns, rows = rank % 2, rank // 2
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor_parallel, data_parallel = pairs[rows], pairs[2 + columns]
    mine = whole[:, 3 * columns : 3 * columns + 3].contiguous()
    inner = _made([(4 * rows, 0, 4, 3)], mine, data_parallel)
    outer = _made([(0, 3 * columns, 8, 3)], whole, tensor_parallel)
    metadata = outer.local_shards()[0].metadata
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(inner, metadata)], sharded_tensor_metadata=outer.metadata(), process_group=tensor_parallel
    )


def _hybrid(whole: torch.Tensor) -> Any:
    """Each pair of ranks has all of the tensor in a group of its own."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    rank = dist.get_rank()
    return _made([(4 * (rank % 2), 0, 4, 6)], whole, pairs[rank // 2])


MAKERS = {"rows": _rows, "nested": _nested, "hybrid": _hybrid}


def _local(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors of a rank."""
    found = []
    for shard in tensor.local_shards():
        found += _local(shard.tensor) if isinstance(shard.tensor, ShardedTensor) else [shard.tensor]
    return found


def _save_and_load(kind: str, directory: Path) -> None:
    saved, empty = MAKERS[kind](values(SHAPE)), MAKERS[kind](torch.zeros(SHAPE, dtype=torch.float64))
    dist_checkpointing.save(to_sharded_state_dict({"w": saved}), directory)
    loaded = dist_checkpointing.load(to_sharded_state_dict({"w": empty}), directory, strict=True)
    assert loaded["w"] is empty
    assert all(torch.equal(a, b) for a, b in zip(_local(empty), _local(saved), strict=True))
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
