"""Separating the leaves that these planners plan themselves from those that they leave to DCP's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor
from shardckpt.state_dict import extract_matching_values, extract_sharded_base, nested_values

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def put_rest(state_dict: ShardedStateDict, path: Sequence[Any], value: Any) -> None:
    """Set a value in a state dict at its path in the rest that :func:`split_shards` gave; shards stay where they are.

    Args:
        state_dict: The whole state dict.
        path: Keys as text and indices, as DCP writes paths; lists of the rest count without shards.
        value: What stands there from now on; a list that the rest has without its shards is put around them.
    """
    nest: Any = state_dict
    for part in path[:-1]:
        nest = nest[_own_key(nest, part)]
    last = _own_key(nest, path[-1])
    places = _rest_places(nest[last]) if isinstance(nest[last], list) else []
    if isinstance(value, list) and len(places) == len(value) < len(nest[last]):
        for place, part in zip(places, value, strict=True):
            nest[last][place] = part
    else:
        nest[last] = value


def _own_key(nest: Any, part: Any) -> Any:
    if isinstance(nest, list):
        return _rest_places(nest)[part]
    return part if part in nest else next(key for key in nest if str(key) == part)


def _rest_places(values: list[Any]) -> list[int]:
    """Indices of what is left in the rest of a list."""
    _, rest = extract_matching_values(values, lambda leaf: isinstance(leaf, ShardedBase), return_lists_as_dicts=True)
    return list(rest)


__all__ = ["put_rest", "split_shards"]
