"""Nested state that plain DCP stored value by value, put together again as the objects that a load asks for.

DCP flattens a state dict: ``{"lr_scheduler": {"last_epoch": 3}}`` is stored as the value ``lr_scheduler.last_epoch``,
and ``planner_data`` has its path. A load asks for objects by key, and gets the values that were stored below the key:

- ``lr_scheduler``: the nested dicts and lists below it, tensors included.
- ``optimizer.param_groups.<name>``: the options of the parameter's group, in both forms of torch's
  ``get_optimizer_state_dict``: ``optimizer.param_groups.0.lr`` with the names of the parameters in
  ``optimizer.param_groups.0.params``, or flattened, ``optimizer.param_groups.<name>.lr``.
"""

from __future__ import annotations

from bisect import bisect_left
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shardckpt.state_dict import nest_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

#: A path in a state dict: keys of dicts, and indices of lists.
_Path = tuple["str | int", ...]

_GROUPS = "param_groups"
_NAMES = "params"


class NestedState:
    """The values that a checkpoint stores one by one, by key.

    ``values`` are the paths of values that are not tensors; ``read_value`` returns one of these by its path.
    """

    def __init__(
        self, values: Iterable[_Path], tensors: Mapping[str, _Path], read_value: Callable[[_Path], Any]
    ) -> None:
        self._read_value = read_value
        self._tensors = tensors
        self._paths = {**{".".join(map(str, path)): path for path in values}, **tensors}
        self._keys = sorted(self._paths)

    def has(self, key: str) -> bool:
        """Return whether there is an object for this key."""
        return bool(self._below(self._key_of_group(key) or key))

    def tensors(self, key: str) -> list[str]:
        """Return the keys of the stored tensors that :meth:`build` needs for this key."""
        return [stored for stored in self._below(self._key_of_group(key) or key) if stored in self._tensors]

    def build(self, key: str, tensors: dict[str, Any]) -> Any:
        """Return the object for a key: nested dicts and lists, or a single value.

        ``tensors`` are the stored tensors by key, at least the ones of :meth:`tensors`. Paths that contradict each
        other are a CorruptCheckpointError.
        """
        group = self._key_of_group(key)
        if group is None:
            return self._build_below(key, tensors)
        # a copy of all names for each of them would take quadratic time
        options = self._build_below(group, tensors, unread=f"{group}.{_NAMES}")
        return {option: value for option, value in options.items() if option != _NAMES}

    def build_all(self, tensors: Mapping[str, Any], keeps: Callable[[str], bool]) -> dict[str, Any]:
        """Return the stored values, nested as they were saved.

        A tensor without a path is at its key, and one that is not given is left out. ``keeps`` says of a path, joined
        by dots, whether another value is wanted. Paths that contradict each other are a CorruptCheckpointError.
        """
        loose = [((key,), tensor) for key, tensor in tensors.items() if key not in self._tensors]
        kept = [
            (path, self._value(key, tensors))
            for key, path in self._paths.items()
            if (key in tensors if key in self._tensors else keeps(key))
        ]
        return nest_values([*loose, *kept])  # type: ignore[no-any-return]

    def _build_below(self, key: str, tensors: dict[str, Any], unread: str = "") -> Any:
        """Return the object of all that is stored below a key, with None for the value that is not read."""
        found = []
        for stored in self._below(key):
            path = (key, *_path_below(self._paths[stored], key)) if stored != key else (key,)
            found.append((path, None if stored == unread else self._value(stored, tensors)))
        return nest_values(found)[key]

    def _value(self, key: str, tensors: Mapping[str, Any]) -> Any:
        return tensors[key] if key in self._tensors else deepcopy(self._read_value(self._paths[key]))

    def _below(self, key: str) -> list[str]:
        """Return the stored keys that are this key, or begin with it and a dot."""
        # "/" is the character after "."
        below = self._keys[bisect_left(self._keys, f"{key}.") : bisect_left(self._keys, f"{key}/")]
        return [key, *below] if key in self._paths else below

    def _key_of_group(self, key: str) -> str | None:
        """Return the key of the numbered group of a parameter, if ``key`` names its options and groups are numbered."""
        prefix, found, name = key.partition(f"{_GROUPS}.")
        return self._numbered_groups.get((prefix, name)) if found else None

    @cached_property
    def _numbered_groups(self) -> dict[tuple[str, str], str]:
        """The key of each parameter's numbered group, by the text before ``param_groups`` and by its name."""
        found: dict[tuple[str, str], str] = {}
        for key, path in self._paths.items():
            if path[-3:-2] == (_GROUPS,) and type(path[-2]) is int and path[-1] == _NAMES and key not in self._tensors:
                prefix = key.removesuffix(f"{_GROUPS}.{path[-2]}.{_NAMES}")
                names = self._read_value(path)
                for name in names if isinstance(names, list) else []:
                    if isinstance(name, (str, int)):
                        found[prefix, str(name)] = key.removesuffix(f".{_NAMES}")
        return found


def _path_below(path: _Path, key: str) -> _Path:
    """Return the part of a path that lies below a key; the key may end inside of a flattened part of the path."""
    begin = len(key) + 1
    for number, part in enumerate(path):
        if begin <= 0:
            return path[number:]
        if begin < len(str(part)):
            return (str(part)[begin:], *path[number + 1 :])
        begin -= len(str(part)) + 1
    return path[-1:]
