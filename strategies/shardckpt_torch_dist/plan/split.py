"""Split a state dict into the leaves that our DCP planners plan, and the rest, which DCP's planners plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.errors import ShardingError
from shardckpt.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor
from shardckpt.state_dict import extract_matching_values, extract_sharded_base, nested_values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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


class RestValues:
    """The values of a state dict besides its shards, by their paths in the rest that :func:`split_shards` returned.

    A path has the keys of dicts as text, and indices, as DCP writes paths; an index counts the items of a list without
    its shards.
    """

    def __init__(self, state_dict: ShardedStateDict) -> None:
        self._state_dict = state_dict
        #: By the id of a dict or list: itself, so that it keeps its id, and its keys or indices by those of the rest.
        self._keys: dict[int, tuple[Any, Mapping[Any, Any]]] = {}

    def set(self, path: Sequence[Any], value: Any) -> None:
        """Set the value at a path; the shards of a list stay, and its other items become those of the value.

        In the place of a list with shards, a value that is no list, or too short a one for the shards in its items, is
        a ShardingError.
        """
        node: Any = self._state_dict
        for part in path[:-1]:
            node = node[self._find_key(node, part)]
        last = self._find_key(node, path[-1])
        self._keys.pop(id(node[last]), None)  # its other items may be more or fewer
        node[last] = _replace_rest(node[last], value, path)

    def _find_key(self, node: Any, part: Any) -> Any:
        if id(node) not in self._keys:  # listed once: for each of many values that would take quadratic time
            if isinstance(node, list):
                keys = dict(enumerate(_list_rest_indices(node)))
            else:
                keys = {str(key): key for key in node} | {key: key for key in node}  # of 1 and "1" the text is "1"
            self._keys[id(node)] = node, keys
        return self._keys[id(node)][1].get(part, part)


def _replace_rest(old: Any, value: Any, path: Sequence[Any]) -> Any:
    """Return a new value with the shards of the old one, which may be a list with shards in it."""
    if not isinstance(old, list) or not _has_shards(old):
        return value
    indices = _list_rest_indices(old)
    if not isinstance(value, list) or any(map(_has_shards, [old[index] for index in indices[len(value) :]])):
        raise ShardingError(
            f"{'.'.join(map(str, path))!r}: the checkpoint has a value of type {type(value).__name__} for a list "
            "with shards, or too short a list: give these a key of their own"
        )
    for index, part in zip(indices, value, strict=False):
        old[index] = _replace_rest(old[index], part, (*path, index))
    for index in reversed(indices[len(value) :]):
        del old[index]
    old.extend(value[len(indices) :])
    return old


def _has_shards(value: Any) -> bool:
    return any(isinstance(leaf, ShardedBase) for leaf in nested_values(value))


def _list_rest_indices(values: list[Any]) -> list[int]:
    """Return the indices of the items of a list that are not shards, nor contain nothing else."""
    _, rest = extract_matching_values(values, lambda leaf: isinstance(leaf, ShardedBase), return_lists_as_dicts=True)
    return list(rest)
