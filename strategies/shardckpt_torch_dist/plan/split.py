"""Split a state dict into the leaves that our DCP planners plan, and the rest, which DCP's planners plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor
from shardckpt.state_dict import extract_matching_values, extract_sharded_base, nested_values

if TYPE_CHECKING:
    from collections.abc import Sequence


def split_shards(state_dict: ShardedStateDict) -> tuple[list[ShardedTensor], list[ShardedObject], dict[str, Any]]:
    """Return the ShardedTensors and the ShardedObjects of a state dict, and a state dict of the rest.

    A leaf that is another kind of shard is a ShardingError.
    """
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


def set_rest_value(state_dict: ShardedStateDict, path: Sequence[Any], value: Any) -> None:
    """Set a value of a state dict by its path in the rest that :func:`split_shards` returned; shards stay.

    The path has keys as text, and indices, as DCP writes paths; an index counts the items of a list without its shards.
    A new value that is a list with one item for each item of the old list that is not a shard replaces those items.
    """
    node: Any = state_dict
    for part in path[:-1]:
        node = node[_resolve_key(node, part)]
    last = _resolve_key(node, path[-1])
    indices = _rest_indices(node[last]) if isinstance(node[last], list) else []
    if isinstance(value, list) and len(indices) == len(value) < len(node[last]):
        for index, part in zip(indices, value, strict=True):
            node[last][index] = part
    else:
        node[last] = value


def _resolve_key(node: Any, part: Any) -> Any:
    if isinstance(node, list):
        return _rest_indices(node)[part]
    return part if part in node else next(key for key in node if str(key) == part)


def _rest_indices(values: list[Any]) -> list[int]:
    """Return the indices of the items of a list that are not shards."""
    _, rest = extract_matching_values(values, lambda leaf: isinstance(leaf, ShardedBase), return_lists_as_dicts=True)
    return list(rest)
