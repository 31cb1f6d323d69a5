"""What many tests say of the ranks that run them, and of the states that they save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardckpt.errors import CheckpointingException
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


def rank_and_size() -> tuple[int, int]:
    """Return this rank and the world size, without a process group too."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def run_here(_: int, function: Callable[..., Any], *args: Any) -> None:
    """Stand for ``ranks.run`` where there is no process group at all."""
    function(*args)


def error_of(action: Callable[..., Any], *args: Any, **options: Any) -> tuple[str, str]:
    """Return class and text of the error of ours that an action raises; two empty texts for none."""
    try:
        action(*args, **options)
    except CheckpointingException as error:
        return type(error).__name__, str(error)
    return "", ""


def entire(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Describe tensors that this process has alone, each under its key."""
    return {key: ShardedTensor.from_rank_offsets(key, tensor) for key, tensor in tensors.items()}


def rows(key: str, full: torch.Tensor) -> list[ShardedTensor]:
    """Describe equal blocks of rows, or uneven ones where the ranks do not divide them."""
    rank, world = rank_and_size()
    if full.shape[0] % world:
        return uneven(key, full)
    return [ShardedTensor.from_rank_offsets(key, full.chunk(world)[rank].clone(), (0, rank, world))]


def columns(key: str, full: torch.Tensor) -> list[ShardedTensor]:
    """Describe strided views of unequal width: an irregular grid along the last axis."""
    rank, world = rank_and_size()
    axis = full.dim() - 1
    edges = [*range(world), full.shape[axis]]
    return [_box(key, full.clone()[..., edges[rank] : edges[rank + 1]], full, axis, edges[rank])]


def uneven(key: str, full: torch.Tensor) -> list[ShardedTensor]:
    """Describe one row on the first rank, all that remain on the last, nothing on one in between."""
    rank, world = rank_and_size()
    edges = [0] + [min(1 + i * (i + 1) // 2, full.shape[0]) for i in range(world - 1)] + [full.shape[0]]
    return [_box(key, full[edges[rank] : edges[rank + 1]].clone(), full, 0, edges[rank])]


def replicated(key: str, full: torch.Tensor) -> list[ShardedTensor]:
    """Describe the whole tensor on each rank."""
    return [ShardedTensor.from_rank_offsets(key, full.clone(), replica_id=rank_and_size()[0])]


def flattened(key: str, full: torch.Tensor) -> list[ShardedTensor]:
    """Describe Megatron's legacy form: the whole tensor flattened, cut inside rows."""
    rank, world = rank_and_size()
    edges = [full.numel() * i // world + i % world for i in range(world + 1)]
    part = slice(edges[rank], edges[rank + 1])
    data = full.reshape(-1)[part].clone()
    return [ShardedTensor.from_rank_offsets_flat(key, data, tuple(full.shape), flattened_range=part)]


def layers(key: str, full: torch.Tensor) -> list[ShardedTensor]:
    """Describe rows as layers of a prepended axis, dealt round to the ranks: several shards of one key a rank."""
    rank, world = rank_and_size()
    count = full.shape[0]
    return [
        ShardedTensor.from_rank_offsets(key, full[row].clone(), (0, row, count), prepend_axis_num=1)
        for row in range(rank, count, world)
    ]


def gated_halves(rank: int, world: int, key: str, data: torch.Tensor, replica_id: Any, _: slice | None) -> list[Any]:
    """Describe a rank's slices of both halves of a gated layer, which it has in one tensor: for a factory."""
    cells = ((0, rank, 2 * world), (0, rank + world, 2 * world))
    return [
        ShardedTensor.from_rank_offsets(key, half, cell, replica_id=replica_id)
        for half, cell in zip(data.chunk(2), cells, strict=True)
    ]


def _box(key: str, data: torch.Tensor, full: torch.Tensor, axis: int, low: int) -> ShardedTensor:
    offset = tuple(low if number == axis else 0 for number in range(full.dim()))
    return ShardedTensor(key, data, data.dtype, tuple(data.shape), tuple(full.shape), offset, None)
