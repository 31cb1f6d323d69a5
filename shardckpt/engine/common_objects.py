"""Objects that a load asks for and whose values the common state has: what a conversion has made of plain DCP's values.

Plain DCP stores the options of an optimizer, and schedules, value by value; in our formats these are common state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.state_dict import build_copy, nested_items

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from shardckpt.mapping import ShardedObject

_GROUPS, _NAMES = "param_groups", "params"
_NOTHING: Any = object()


class CommonObjects:
    """The common state, by the keys of objects.

    Args:
        common: The common state.
    """

    def __init__(self, common: Mapping[str, Any]) -> None:
        self._common = common

    def list_keys(self) -> list[str]:
        """Return the keys of all values."""
        return [".".join(map(str, path)) for path, _ in nested_items(self._common)]

    def build(self, absent: Iterable[ShardedObject]) -> dict[str, Any]:
        """Return copies of the values of objects that are not stored, by their unique keys: of those that are there."""
        pairs = ((shard.unique_key, self._find(shard.key)) for shard in absent)
        return {key: build_copy(value) for key, value in pairs if value is not _NOTHING}

    def _find(self, key: str) -> Any:
        """Return the value of a key; of ``optimizer.param_groups.<name>`` the options of the parameter's group."""
        prefix, is_group, name = key.partition(f"{_GROUPS}.")
        groups = _walk(self._common, f"{prefix}{_GROUPS}") if is_group else _NOTHING
        for group in groups if isinstance(groups, list) else ():
            if isinstance(group, dict) and name in group.get(_NAMES, ()):
                return {option: value for option, value in group.items() if option != _NAMES}
        found = _walk(self._common, key)
        return self._gather(key) if found is _NOTHING else found

    def _gather(self, key: str) -> Any:
        """Return the values below a key that stand under flat names: torch's flattened options of a parameter."""
        leaves = ((".".join(map(str, path)), value) for path, value in nested_items(self._common))
        found = {name[len(key) + 1 :]: value for name, value in leaves if name.startswith(f"{key}.")}
        return found or _NOTHING


def _walk(node: Any, key: str) -> Any:
    """Return what is at a key of nested dicts and lists, whose parts may have dots themselves."""
    if isinstance(node, dict):
        for name, value in node.items():
            if str(name) == key:
                return value
            if key.startswith(f"{name}.") and (found := _walk(value, key[len(str(name)) + 1 :])) is not _NOTHING:
                return found
    if isinstance(node, list):
        first, _, rest = key.partition(".")
        if first.isdecimal() and int(first) < len(node):
            return _walk(node[int(first)], rest) if rest else node[int(first)]
    return _NOTHING
