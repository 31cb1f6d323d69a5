"""Separating the leaves that these planners plan themselves from those that they leave to DCP's."""

from __future__ import annotations

from typing import Any

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor
from shardckpt.state_dict import extract_sharded_base, nested_values


def split_shards(state_dict: ShardedStateDict) -> tuple[list[ShardedTensor], list[ShardedObject], dict[str, Any]]:
    """The sharded tensors, the sharded objects, and a state dict of all else; factories must be built."""
    sharded, rest = extract_sharded_base(state_dict)
    tensors: list[ShardedTensor] = []
    objects: list[ShardedObject] = []
    for shard in nested_values(sharded):
        if isinstance(shard, ShardedTensor):
            tensors.append(shard)
        elif isinstance(shard, ShardedObject):
            objects.append(shard)
        elif isinstance(shard, ShardedBase):
            raise ShardingError(
                f"{shard.key!r}: a planner cannot store a {type(shard).__name__}; apply_factories first"
            )
    return tensors, objects, rest


__all__ = ["split_shards"]
