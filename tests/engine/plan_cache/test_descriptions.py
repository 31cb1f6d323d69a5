"""What shards say of themselves: all that a plan depends on."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import torch

from shardckpt.engine.plan_cache import describe
from shardckpt.mapping import BlockScales, PlainObject, ShardedObject, ShardedTensor
from tests.tables import table

SHARDS = {
    ShardedTensor: ShardedTensor(
        "w", torch.ones(4), torch.float32, (4,), (8,), (4,), (2,), flattened_range=slice(0, 4)
    ),
    ShardedObject: ShardedObject("w", None, (2,), (0,)),
    PlainObject: PlainObject("w", None, keys=("a", "b")),
}
OTHERS: dict[str, Any] = {
    "key": "v",
    "data": torch.ones(5),
    "dtype": torch.int32,
    "replica_id": 1,
    "replicated": True,
    "prepend_axis_num": 1,
    "allow_shape_mismatch": True,
    "flattened_range": slice(0, 3),
    "block_scales": BlockScales("s", (2,)),
}


@table(
    ("kind", "field"),
    [
        (kind, field.name)
        for kind in SHARDS
        for field in fields(kind)
        if field.name != "data" or not issubclass(kind, ShardedObject)
    ],
)
def test_every_field_is_in_the_description(kind: type[Any], field: str) -> None:
    """Two shards that differ in any field are never taken for each other; new fields of the classes come here, too."""
    shard = SHARDS[kind]
    other = copy.copy(shard)
    setattr(other, field, OTHERS.get(field, (7,)))
    assert describe([shard]) == describe([copy.copy(shard)])
    assert describe([shard]) != describe([other])


def test_the_order_of_shards_and_their_kinds_are_in_the_description() -> None:
    """Shards that change places, and an object that becomes a tensor, are other shards."""
    tensor, shard, plain = SHARDS.values()
    assert describe([tensor, shard]) != describe([shard, tensor])
    assert describe([shard, plain]) != describe([plain, shard])
    assert describe([tensor]) != describe([shard])
    assert describe([tensor, tensor]) != describe([tensor])
