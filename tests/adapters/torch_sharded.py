"""What the tests of torch sharded share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards

SHAPE = (8, 6)


def made(boxes: list[tuple[int, int, int, int]], whole: torch.Tensor, group: Any = None) -> Any:
    """A ShardedTensor of which this rank has rows and columns ``(r, c, height, width)`` of the whole."""
    shards = [
        Shard.from_tensor_and_offsets(whole[r : r + h, c : c + w].clone(), [r, c], dist.get_rank())
        for r, c, h, w in boxes
    ]
    return init_from_local_shards(shards, *whole.shape, process_group=group)


def two_bands(whole: torch.Tensor) -> Any:
    """Two bands of rows a rank, and none on the last of three ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    owners = max(world - 1, 1)
    height = SHAPE[0] // (2 * owners)
    mine = [(band * height, 0, height, SHAPE[1]) for band in range(2 * owners) if band % owners == rank]
    return made(mine if rank < owners else [], whole)


def nested(whole: torch.Tensor) -> Any:
    """FSDP1 over tensor parallelism: ranks (0, 1) and (2, 3) are tensor parallel, (0, 2) and (1, 3) data parallel.

    Columns are cut first; the columns of a rank are a tensor of which the data-parallel ranks have the rows.
    """
    rank = dist.get_rank()
    columns, rows = rank % 2, rank // 2
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor_parallel, data_parallel = pairs[rows], pairs[2 + columns]
    mine = whole[:, 3 * columns : 3 * columns + 3].contiguous()
    inner = made([(4 * rows, 0, 4, 3)], mine, data_parallel)
    outer = made([(0, 3 * columns, 8, 3)], whole, tensor_parallel)
    metadata = outer.local_shards()[0].metadata
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(inner, metadata)], sharded_tensor_metadata=outer.metadata(), process_group=tensor_parallel
    )


def hybrid(whole: torch.Tensor) -> Any:
    """Each pair of ranks has all of the tensor in a group of its own."""
    pairs = [dist.new_group(pair) for pair in ([0, 1], [2, 3])]
    rank = dist.get_rank()
    return made([(4 * (rank % 2), 0, 4, 6)], whole, pairs[rank // 2])


MAKERS = {"rows": two_bands, "nested": nested, "hybrid": hybrid}


def local_tensors(tensor: Any) -> list[torch.Tensor]:
    """The plain tensors of a rank."""
    found = []
    for shard in tensor.local_shards():
        found += local_tensors(shard.tensor) if isinstance(shard.tensor, ShardedTensor) else [shard.tensor]
    return found
