"""Read the tensors of an object that was described, in whatever containers they are."""

from __future__ import annotations

import math
import types
from collections import deque
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shardckpt.archive.lazy_tensors import LazyTensor
from shardckpt.errors import CorruptCheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from shardckpt.archive.payload import StoredPayload

#: Classes of most values, which have no parts.
_PLAIN = frozenset((int, float, bool, str, bytes, type(None)))
#: Bytes of a tensor that may have more elements than its storage, as an expanded one has.
_EXPANDED = 1 << 20


class LazyReads:
    """Puts the values of tensors in the places of the :class:`LazyTensor` that :meth:`Archive.describe` has left.

    It looks into dicts, lists, tuples, sets, deques and the attributes and slots of objects. Each object is visited
    once, however often it is referred to: a pickle of 60 tuples, each with the one before twice, names 2^60 places.
    ``read`` returns a tensor; it gets the key that :meth:`fill` got, for errors.
    """

    def __init__(self, read: Callable[[LazyTensor, str], torch.Tensor]) -> None:
        self._read = read
        #: The visited objects and their replacements, by identity; with the object, so that no other gets its id.
        self._visited: dict[int, tuple[Any, Any]] = {}

    def fill(self, value: Any, key: str) -> Any:
        """Return a value that was described, or a part of it, with its tensors.

        Mutable containers are changed in place; a tuple or set that has a tensor is replaced, and so is a tensor that
        was described alone. Too deep nesting is a CorruptCheckpointError.
        """
        try:
            return self._fill(value, key)
        except RecursionError as exc:
            raise CorruptCheckpointError(f"{key!r:.200} is nested too deep") from exc

    def _fill(self, value: Any, key: str) -> Any:
        if id(value) in self._visited:
            return self._visited[id(value)][1]
        made = value
        if isinstance(value, LazyTensor):
            made = self._read(value, key)
        elif type(value) in (set, frozenset) or isinstance(value, tuple):
            parts = [self._fill(part, key) for part in value]
            if any(new is not old for new, old in zip(parts, value, strict=True)):
                # not by its own constructor, which may take other arguments: a named one takes its fields one by one
                made = tuple.__new__(type(value), parts) if isinstance(value, tuple) else type(value)(parts)
            if attributes := getattr(value, "__dict__", None):
                vars(made).update(attributes)
                self._replace(vars(made), list(attributes.items()), key)
        elif type(value) not in _PLAIN:
            self._visited[id(value)] = value, value  # before its parts: it may be one of them
            if isinstance(value, dict):
                self._fill_keys(value, key)
                self._replace(value, list(value.items()), key)
            elif isinstance(value, (list, deque)):
                self._replace(value, list(enumerate(value)), key)
            attributes = getattr(value, "__dict__", None)
            if type(attributes) is dict:  # of a namespace, an ordered dict, a stub
                self._replace(attributes, list(attributes.items()), key)
            self._fill_slots(value, key)
            return value
        self._visited[id(value)] = value, made
        return made

    def _fill_keys(self, container: dict[Any, Any], key: str) -> None:
        """Fill the keys that are tensors, or have some, as an optimizer's state by parameters has; the order stays."""
        names = [name if type(name) in _PLAIN else self._fill(name, key) for name in container]
        if any(new is not old for new, old in zip(names, container, strict=True)):
            parts = list(container.values())
            container.clear()
            for name, part in zip(names, parts, strict=True):
                container[name] = part  # noqa: PERF403 - a Counter counts the pairs of an update

    def _fill_slots(self, value: Any, key: str) -> None:
        for slot in _list_slots(type(value)):  # type: ignore[arg-type]  # mypy: a class is no Hashable
            with suppress(AttributeError):  # one that was never set
                part = slot.__get__(value)
                if (made := self._fill(part, key)) is not part:
                    slot.__set__(value, made)  # which a frozen dataclass allows, too

    def _replace(self, container: Any, parts: list[tuple[Any, Any]], key: str) -> None:
        for name, part in parts:
            made = self._fill(part, key)
            if made is not part:
                container[name] = made


@lru_cache(maxsize=1024)  # of each class once: most values are numbers and texts
def _list_slots(kind: type) -> list[types.MemberDescriptorType]:
    classes = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [each for names in classes for each in names.values() if isinstance(each, types.MemberDescriptorType)]


def refuse_expanded(stored: StoredPayload, what: str) -> None:
    """Refuse a tensor that has so many more elements than its storage that no save has made it."""
    if math.prod(stored.shape) * stored.dtype.itemsize > max(stored.nbytes, _EXPANDED):
        raise CorruptCheckpointError(
            f"{what} of shape {stored.shape} and {stored.dtype} has only {stored.nbytes} bytes"
        )
