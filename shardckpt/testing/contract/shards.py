"""Global tensors cut in the ways in which trainers cut them: the shards that each rank saves, and must load."""

from __future__ import annotations

import zlib
from itertools import product
from typing import TYPE_CHECKING, Any

from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.testing.checks import check_same
from shardckpt.testing.memory import garbage, plain
from shardckpt.testing.tensors import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Layout = Callable[[str, torch.Tensor, int, int], list[ShardedTensor]]

SHAPE = (12, 8)


def make_tensor(key: str, dtype: torch.dtype, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    """Return the global tensor of a key: random bytes as elements, the same in every process."""
    return TensorSpec(key, dtype, shape, zlib.crc32(key.encode())).values()


def whole_shard(key: str, tensor: torch.Tensor, replica_id: int = 0) -> ShardedTensor:
    """Return a shard that is the whole tensor."""
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=replica_id)


def box_shard(key: str, tensor: torch.Tensor, region: tuple[slice, ...]) -> ShardedTensor:
    """Return the shard of a box: a copy of the region of a global tensor."""
    data = plain(tensor)[region].clone().view(tensor.dtype)
    offset = tuple(part.indices(size)[0] for part, size in zip(region, tensor.shape, strict=True))
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), tuple(tensor.shape), offset, None)


def _rows(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    return [ShardedTensor.from_rank_offsets(key, tensor.chunk(world)[rank].clone(), (0, rank, world))]


def _columns(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    edges = [tensor.shape[1] * number // world for number in range(world + 1)]
    return [box_shard(key, tensor, (slice(None), slice(edges[rank], edges[rank + 1])))]


def _grid(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """A grid of 3 by 2 shards, dealt round: ranks have several shards of a tensor."""
    rows, columns = tensor.shape[0] // 3, tensor.shape[1] // 2
    return [
        ShardedTensor.from_rank_offsets(
            key, tensor[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].clone(), (0, i, 3), (1, j, 2)
        )
        for i, j in [*product(range(3), range(2))][rank::world]
    ]


def _uneven(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """Rows of any number; where there are several ranks, the first has none."""
    rows = tensor.shape[0]
    edges = [0, *(min(5 * number, rows) for number in range(world - 1)), rows] if world > 1 else [0, rows]
    return [box_shard(key, tensor, (slice(edges[rank], edges[rank + 1]), slice(None)))]


def _prepended(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """A row a shard along a prepended axis, dealt round: layers of a stack."""
    rows = tensor.shape[0]
    return [
        ShardedTensor.from_rank_offsets(key, tensor[row].clone(), (0, row, rows), prepend_axis_num=1)
        for row in range(rank, rows, world)
    ]


def _replicated(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """The whole tensor on every rank; the main replica is on the last one."""
    return [whole_shard(key, tensor.clone(), world - 1 - rank)]


def _one_rank(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """The last rank has it; the others do not know the key."""
    return [whole_shard(key, tensor.clone())] if rank == world - 1 else []


def _flattened(key: str, tensor: torch.Tensor, rank: int, world: int) -> list[ShardedTensor]:
    """Slices of the flattened tensor that begin and end inside rows."""
    edges = [0, *(tensor.numel() * number // world + number for number in range(1, world)), tensor.numel()]
    start, stop = edges[rank : rank + 2]
    data = plain(tensor).reshape(-1)[start:stop].clone().view(tensor.dtype)
    return [ShardedTensor.from_rank_offsets_flat(key, data, tuple(tensor.shape), flattened_range=slice(start, stop))]


LAYOUTS: dict[str, Layout] = {
    "rows": _rows,
    "columns": _columns,
    "grid": _grid,
    "uneven": _uneven,
    "prepended": _prepended,
    "replicated": _replicated,
    "one rank": _one_rank,
    "flattened": _flattened,
}


def make_shards(
    layouts: Sequence[str], dtypes: Sequence[torch.dtype], rank: int, world: int, shift: int = 0
) -> dict[str, list[ShardedTensor]]:
    """Return a rank's shards of a tensor for every layout and dtype, by key.

    Args:
        layouts: Names of layouts.
        dtypes: The dtypes.
        rank: The rank.
        world: Number of ranks.
        shift: Cut each tensor in the layout this many places after its own in the list.
    """
    shards = {}
    for dtype in dtypes:
        for number, name in enumerate(layouts):
            key = f"{name}.{dtype}"
            layout = LAYOUTS[layouts[(number + shift) % len(layouts)]]
            shards[key] = layout(key, make_tensor(key, dtype), rank, world)
    return shards


def blank(shards: dict[str, list[ShardedTensor]]) -> dict[str, list[ShardedTensor]]:
    """Return the same shards with other values, for a load to fill."""
    for shard in (shard for some in shards.values() for shard in some):
        if shard.data is not None:
            shard.data = garbage(shard.data.numel(), shard.dtype).view(shard.data.shape)
    return shards


def check_shards(found: dict[str, Any], expected: dict[str, list[ShardedTensor]]) -> None:
    """Check the result of a load, shard by shard."""
    for key, shards in expected.items():
        for value, shard in zip(found.get(key, []), shards, strict=True):
            place = f"{key!r} at {shard.global_offset}"
            check_same(value, shard.data, place)  # type: ignore[arg-type]
