from __future__ import annotations

import pickle

import torch

from shardckpt.chunks import Chunk, Item, StoredTensor
from shardckpt.planning.boxes import Box
from shardckpt_torch_dist.dialects.metadata_pickle import encode_metadata
from tests.torch_dist.dialects.metadata_pickle import FILE, check_equal, stock
from tests.torch_dist.indexes import index_of


def test_many_axes_and_many_chunks() -> None:
    """A tensor of 60 axes, one of more chunks than are made at a time, and more names than a byte counts are right."""
    deep = Chunk(Box((0,) * 60, (1,) * 60), Item(FILE, 0, 700), 0, 1)
    rows = {(n,): Chunk(Box((n,), (1,)), Item(FILE, n * 600, 600 + n), 0, 1) for n in range(40_000)}
    tensors = {
        "deep": StoredTensor(torch.uint8, (1,) * 60, {deep.box.offset: deep}),
        "long": StoredTensor(torch.int64, (40_000,), rows),
        "none": StoredTensor(torch.int64, (3, 0), {}),
    }
    index = index_of({**tensors, **{f"k{n}": tensors["none"] for n in range(1000)}}, {})
    check_equal(pickle.loads(encode_metadata(index, "id")), stock(index, "id"))
