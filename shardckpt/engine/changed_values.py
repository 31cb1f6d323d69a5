"""Values that a load's casts have changed: rounded integers, floats that became infinite, lost infinities and signs.

Dtypes do not tell: a step count of 1,000 comes through float32, one of 2**24 + 1 does not. The results of such casts
are examined once they are loaded; a suspicious tensor is read once more in its stored dtype, one at a time.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.mapping.sharded_tensor import ShardedTensor
from shardckpt.planning.dtypes import describe_changed_value
from shardckpt.tensors.casts import find_changed_value, may_be_changed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from shardckpt.mapping.base import ShardedBase


def find_suspects(
    wanted: Sequence[ShardedBase], values: Sequence[Any], dtypes: Mapping[str, torch.dtype]
) -> list[ShardedTensor]:
    """Return the shards that a cast may have changed."""
    return [
        shard
        for shard, value in zip(wanted, values, strict=True)
        if isinstance(shard, ShardedTensor)
        and isinstance(value, torch.Tensor)
        and may_be_changed(value, dtypes.get(shard.key, shard.dtype))
    ]


def request_stored_values(shards: Sequence[ShardedTensor], dtypes: Mapping[str, torch.dtype]) -> list[ShardedBase]:
    """Return the shards to be loaded into new memory of the stored dtypes."""
    found: list[ShardedBase] = []
    for shard in shards:
        again = copy.copy(shard)
        again.data, again.dtype = None, dtypes[shard.key]
        found.append(again)
    return found


def describe_faults(shards: Sequence[ShardedTensor], sources: Sequence[torch.Tensor]) -> Iterator[str]:
    """Yield a line for each shard whose dtype cannot hold a stored value."""
    for shard, source in zip(shards, sources, strict=True):
        if found := find_changed_value(source, shard.dtype):
            yield describe_changed_value(shard.key, source.dtype, shard.dtype, *found)
