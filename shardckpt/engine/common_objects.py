"""Objects that a load requests and that a conversion of plain DCP has put into the common state.

Plain DCP stores the options of an optimizer, and schedules, value by value; in our formats these are common state.
"""

from __future__ import annotations

from bisect import bisect_left
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardckpt.mapping.sharded_object import ShardedObject

_GROUPS, _NAMES = "param_groups", "params"
_NOTHING: Any = object()


class CommonObjects:
    """The common state, by the keys of objects."""

    def __init__(self, common: Mapping[str, Any]) -> None:
        self._common = common

    def has(self, key: str) -> bool:
        """Return whether the common state has a value for a key."""
        return self._find(key) is not _NOTHING

    def list_below(self, key: str) -> list[str]:
        """Return the keys of values that begin with a key and a dot."""
        keys = self._sorted_keys
        # "/" is the character after "."
        return keys[bisect_left(keys, f"{key}.") : bisect_left(keys, f"{key}/")]

    def build(self, absent: Iterable[ShardedObject]) -> dict[str, Any]:
        """Return copies of the values of objects that are not stored but in the common state, by unique key.

        Parts of an object are not built: the common state does not say whose they are.
        """
        whole = (shard for shard in absent if set(shard.global_shape) <= {1})
        pairs = ((shard.unique_key, self._find(shard.key)) for shard in whole)
        return {key: deepcopy(value) for key, value in pairs if value is not _NOTHING}

    @cached_property
    def _values(self) -> dict[str, Any]:
        return dict(_list_values(self._common, ""))

    @cached_property
    def _sorted_keys(self) -> list[str]:
        return sorted(self._values)

    @cached_property
    def _options(self) -> dict[str, dict[str, Any]]:
        """The options of each parameter's group, by ``optimizer.param_groups.<name>``."""
        return dict(_list_options(self._common, ""))

    def _find(self, key: str) -> Any:
        if key in self._options:
            return self._options[key]
        found = _look_up(self._common, key)
        return self._gather(key) if found is _NOTHING else found

    def _gather(self, key: str) -> Any:
        """Return the values below a key that stand under flat names: torch's flattened options of a parameter."""
        return {name[len(key) + 1 :]: self._values[name] for name in self.list_below(key)} or _NOTHING


def _list_values(node: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by key; a list is one value: where it was sharded, it has lost entries."""
    for name, value in node.items():
        if isinstance(value, dict):
            yield from _list_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _list_options(node: Any, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options of each parameter that numbered groups in nested dicts name."""
    for name, value in node.items() if isinstance(node, dict) else ():
        if name == _GROUPS and isinstance(value, list):
            for group in value:
                if isinstance(group, dict) and isinstance(group.get(_NAMES), list):
                    options = {option: each for option, each in group.items() if option != _NAMES}
                    yield from ((f"{prefix}{_GROUPS}.{each}", options) for each in group[_NAMES])
        else:
            yield from _list_options(value, f"{prefix}{name}.")


def _look_up(node: Any, key: str) -> Any:
    """Return the value at a key of nested dicts; names may have dots themselves, and be numbers."""
    parts = key.split(".") if isinstance(node, dict) else []
    for count in range(len(parts), 0, -1):
        name, rest = ".".join(parts[:count]), ".".join(parts[count:])
        number = int(name) if name.isdecimal() and name.isascii() and str(int(name)) == name else name
        found = node.get(name, node.get(number, _NOTHING))
        if found is not _NOTHING and rest:
            found = _look_up(found, rest)
        if found is not _NOTHING:
            return found
    return _NOTHING
