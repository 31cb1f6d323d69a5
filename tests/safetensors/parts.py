"""A strategy whose index is in small parts, whatever is saved; and states of many boxes for it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt_safetensors import SafetensorsSaveShardedStrategy


class InParts(SafetensorsSaveShardedStrategy):
    """Makes parts of about 8 boxes, with pages of 3."""

    caches_plan = True
    gathered_bytes = 0
    part_rows = 8
    page_rows = 3


VALUES = {
    "rows": torch.arange(60.0 * 4).view(60, 4),
    "columns": torch.arange(5 * 48, dtype=torch.int16).view(5, 48),
    "grid": torch.arange(12 * 10 * 3, dtype=torch.float64).view(12, 10, 3),
    "vector": torch.arange(31, dtype=torch.bfloat16),
    "scalar": torch.tensor(7),
    "empty": torch.empty(0, 3),
}


def make_state(*, filled: bool = True, rank: int | None = None, world: int | None = None) -> dict[str, Any]:
    """Return this rank's boxes of all tensors: many of each, dealt to the ranks in turn; and an object."""
    rank = dist.get_rank() if rank is None else rank
    world = dist.get_world_size() if world is None else world
    state: dict[str, Any] = {}
    cuts = {
        "rows": [range(0, 60, 1), [0]],
        "columns": [[0], range(0, 48, 2)],
        "grid": [[0, 2, 3, 9], range(0, 10, 2), [0, 2]],
        "vector": [range(0, 31, 5)],
        "scalar": [],
        "empty": [[0], [0, 2]],
    }
    for key, value in VALUES.items():
        boxes: list[list[slice]] = [[]]
        for axis, starts in enumerate(cuts[key]):
            ends = [*list(starts)[1:], value.shape[axis]]
            boxes = [[*box, slice(low, high)] for box in boxes for low, high in zip(starts, ends, strict=True)]
        state[key] = []
        for number, box in enumerate(boxes):
            if number % world == rank:
                data = value[tuple(box)].clone() if filled else torch.zeros_like(value[tuple(box)])
                offset = tuple(part.start for part in box)
                shape = tuple(value.shape)
                state[key].append(ShardedTensor(f"m.{key}", data, value.dtype, tuple(data.shape), shape, offset, None))
    data = {"rank": rank} if filled else None
    return {**state, "object": ShardedObject("object", data, (world,), (rank,)), "step": 5}
