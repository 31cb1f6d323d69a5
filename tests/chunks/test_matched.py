from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from shardckpt.chunks.matched import MatchedShards
from shardckpt.chunks.stored import Chunks
from shardckpt.mapping import ShardedTensor
from shardckpt.planning.shard_fields import list_boxes
from shardckpt.planning.table import Table
from tests.tables import table

_WIDE = 1 << 40


@table(
    ("extent", "first", "volume", "taken"),
    [
        ((4, 8), 0, 32, 1),
        ((4, 8), 8, 40, 1),
        ((4, 8), 8, 32, 0),  # more elements than its item has
        ((4, 8), -8, 32, 0),
        ((4, 8), 1 << 62, (1 << 62) + 32, 0),  # a number of bytes beyond an int64
        ((_WIDE, _WIDE), 0, 32, 0),  # a number of elements beyond it
    ],
)
def test_chunks_that_claim_too_much_are_not_read_in_columns(
    extent: tuple[int, int], first: int, volume: int, taken: int
) -> None:
    """What an index says of a chunk may not be so: only a region inside of its item is copied as bytes."""
    shard = ShardedTensor("w", torch.zeros(1, 8), torch.float32, (1, 8), (_WIDE, _WIDE), (1, 0), None)
    column = torch.zeros(1, dtype=torch.int64)
    chunks = Chunks(
        box=Table(column, torch.zeros(1, 2, dtype=torch.int64), torch.tensor([extent])),
        file=column,
        start=column,
        length=column + 128 + 32 * (volume == 40),
        first=column + first,
        volume=column + volume,
    )
    index: Any = SimpleNamespace(dtypes=[torch.float32], shapes=[(_WIDE, _WIDE)], files=["data"], keys=["w"])
    matched = MatchedShards([shard], list_boxes([shard], column), chunks, torch.tensor([0, 1]), index, column)
    assert not matched.uncovered
    found = matched.pop_contiguous()
    assert (0 if found is None else len(found.file)) == taken
