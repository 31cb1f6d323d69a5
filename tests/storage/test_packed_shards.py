"""Shards as bytes, and back."""

from __future__ import annotations

import torch

from shardckpt.mapping import ShardedObject, ShardedTensor
from shardckpt.planning.table import Boxes
from shardckpt.storage.packed_shards import PackedShards
from shardckpt.validation.sharding import describe_shards

SHAPES = [(4, 6), (), (0, 3), (5,)]
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.float8_e4m3fn]


def _packed(objects: list[str]) -> PackedShards:
    boxes = Boxes()
    for number, (shape, rows) in enumerate(zip(SHAPES, [2, 0, 0, 5], strict=True)):
        boxes.add(number, (0,) * len(shape), (rows, *shape[1:]) if shape else ())
    boxes.add(0, (2, 0), (2, 6))
    return PackedShards.pack(["a", "b", "c", "ü/d"], DTYPES, SHAPES, boxes.table(), objects)


def test_what_is_unpacked_is_what_was_packed() -> None:
    """Tensors of any shape and dtype, and objects, come back as they are described without packing."""
    shards = [
        ShardedTensor("a", None, torch.float32, (2, 6), (4, 6), (0, 0), None),
        ShardedTensor("b", None, torch.int64, (), (), (), None),
        ShardedTensor("c", None, torch.bfloat16, (0, 3), (0, 3), (0, 0), None),
        ShardedTensor("ü/d", None, torch.float8_e4m3fn, (5,), (5,), (0,), None),
        ShardedTensor("a", None, torch.float32, (2, 6), (4, 6), (2, 0), None),
        ShardedObject("o", None, (3, 2), (1, 1)),
    ]
    packed = _packed([shard.unique_key for shard in shards if isinstance(shard, ShardedObject)])
    specs, table = packed.unpack()
    expected = describe_shards(shards)
    assert packed.size == len(shards) == len(table.spec)
    assert specs == expected.specs
    for found, wanted in zip(table, expected.table, strict=True):
        assert torch.equal(found, wanted)


def test_some_rows() -> None:
    """Of the rows those that are asked for remain, by their numbers, and of the objects those by name."""
    keys = [ShardedObject(key, None, (1,), (0,)).unique_key for key in "pq"]
    some = _packed(keys).select([1, 4], keys[1:])
    table, objects = some.unpack_boxes()
    assert (some.size, objects) == (3, keys[1:])
    assert table.spec.tolist() == [1, 0]
    assert table.offset.tolist() == [[0, 0], [2, 0]]
    assert _packed(keys) == _packed(keys) != some
    assert _packed([]).select([], []).unpack()[1].spec.tolist() == []
