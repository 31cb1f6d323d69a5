"""What the tests of dist checkpointing share."""

from __future__ import annotations

from typing import Any

import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.mapping import LocalNonpersistentObject, ShardedObject
from tests.states import columns, flattened, layers, rank_and_size, replicated, rows, uneven

ROWS, COLUMNS = 12, 10


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)


def value_of(dtype: torch.dtype) -> torch.Tensor:
    """A whole tensor of a dtype."""
    numbers = torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    return (numbers % 2 == 0) if dtype == torch.bool else (numbers % 17 if dtype.itemsize == 1 else numbers).to(dtype)


LAYOUTS = {f.__name__: f for f in (columns, flattened, layers, replicated, rows, uneven)}


def state_of(layout: str, *, filled: bool) -> dict[str, Any]:
    """Every dtype under one layout, with objects, common state and a local object around."""
    rank, world = rank_and_size()
    make = LAYOUTS[layout]
    tensors = {}
    for dtype in DTYPES:
        shards = make(f"t.{dtype}", value_of(dtype))
        for shard in shards:
            if shard.data is not None and not filled:
                shard.data.zero_()
        tensors[str(dtype)] = shards
    return {
        "tensors": tensors,
        "objects": [ShardedObject("rng", {"rank": rank} if filled else None, (world,), (rank,))],
        "step": 11 if filled else 0,
        "mine": LocalNonpersistentObject(rank),
    }


def save_by(path: str, layout: str) -> None:
    """Save under a layout."""
    dc.save(state_of(layout, filled=True), path)


def load_by(path: str, layout: str, saved_by: int) -> None:
    """Load under another layout and compare with what the whole tensors say."""
    rank, world = rank_and_size()
    wanted = state_of(layout, filled=False)
    if world != saved_by:
        del wanted["objects"]
    expected = state_of(layout, filled=True)
    loaded = dc.load(wanted, path)
    for dtype in map(str, DTYPES):
        for got, shard, asked in zip(
            loaded["tensors"][dtype], expected["tensors"][dtype], wanted["tensors"][dtype], strict=True
        ):
            assert got.dtype == shard.data.dtype
            assert got is asked.data
            assert torch.equal(
                got.reshape(-1).float() if got.is_floating_point() else got.reshape(-1),
                shard.data.reshape(-1).float() if got.is_floating_point() else shard.data.reshape(-1),
            )
    assert loaded["step"] == 11
    assert loaded["mine"] == rank
    if world == saved_by:
        assert loaded["objects"] == [{"rank": rank}]
