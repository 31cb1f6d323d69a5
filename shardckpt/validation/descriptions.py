"""Check that descriptions of shards do not contradict themselves: equal shards' at once."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from shardckpt.errors import ShardingError
from shardckpt.mapping.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardckpt.mapping.base import ShardedBase

_described = attrgetter("local_shape", "dtype")
_actual = attrgetter("data.shape", "data.dtype")
#: Where a shard is in its tensor.
_place = attrgetter("local_shape", "global_shape", "global_offset", "axis_fragmentations", "prepend_axis_num")


def validate_descriptions(shards: Sequence[ShardedBase]) -> None:
    """Call ``validate_metadata_integrity`` of each shard, or find out faster that it would raise nothing."""
    tensors = [shard for shard in shards if type(shard) is ShardedTensor]
    are_sound = _are_sound(tensors)
    for shard in shards:
        if not are_sound or type(shard) is not ShardedTensor:
            shard.validate_metadata_integrity()


def _are_sound(shards: Sequence[ShardedTensor]) -> bool:
    """Return whether no description of a tensor contradicts itself; False if that takes a look at each.

    Many tensors of a model have the same shapes and offsets: each combination is checked once.
    """
    if any(shard.flattened_range is not None or shard.block_scales is not None for shard in shards):
        return False
    with_data = [shard for shard in shards if shard.data is not None]
    if list(map(_described, with_data)) != list(map(_actual, with_data)):
        return False
    try:
        each = dict(zip(map(_place, shards), shards, strict=True))
    except TypeError:  # a list among them
        return False
    try:
        for shard in each.values():
            shard.validate_metadata_integrity()
    except ShardingError:  # the first one is to be named
        return False
    return True
