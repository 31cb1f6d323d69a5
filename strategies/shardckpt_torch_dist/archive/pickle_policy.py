"""What a pickle may do with what it got: which calls, which states, and how much memory they may take."""

from __future__ import annotations

import argparse
import collections
import io
import sys
import types
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CorruptCheckpointError, UnsafePickleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: Values that an error shows of a tuple.
_SHORT = 16


def brief(value: Any) -> str:
    """A value in an error: plain ones and short tuples of them by their repr, which of a nest may have no end."""
    if type(value) in (tuple, list) and len(value) <= _SHORT and all(type(item) in _SCALARS for item in value):
        return f"({', '.join(map(brief, value))})"
    if type(value) in (str, bytes):
        return f"{value[:80]!r}"
    if isinstance(value, (type, Shield, Marker, Unbuilt, bool, float, types.NoneType)):
        return f"{value!r:.80}"
    return f"{value}" if type(value) is int and abs(value) < 1 << 64 else f"a {_name(type(value))}"


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


class Shield:
    """A function whose own attributes (defaults, code) a pickle cannot reach."""

    __slots__ = ("_function", "copies")
    _function: Callable[..., Any]
    copies: bool

    def __init__(self, function: Callable[..., Any], copies: bool) -> None:
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "copies", copies)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        return self._function(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafePickleError(f"a pickle tries to set {name!r} of a function: refused")


def shielded(function: Callable[..., Any], *, copies: bool = False) -> Shield:
    """The function as a pickle may call it; ``copies`` says that its result is as large as its arguments."""
    return Shield(function, copies)


class Marker:
    """Stands for a class that a pickle may name as an argument, and neither call nor change."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, as a name>"


class Unbuilt:
    """What a pickle makes first and fills later: BUILD replaces it by what ``build`` makes of the state.

    Attributes:
        build: Makes the finished value of a pickled state.
        keys: Where the unpickler's memo has it.
    """

    __slots__ = ("_what", "build", "keys")

    def __init__(self, what: str, build: Callable[[Any], Any]) -> None:
        self._what = what
        self.build = build
        self.keys: list[int] = []

    def __repr__(self) -> str:
        return f"<{self._what} without its state>"


_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (
    *(list, tuple, set, frozenset, dict, bytearray, torch.Size),
    *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
)
_TEXTS = (str, bytes, bytearray, memoryview)
#: Bytes that a call takes to be worth, one of our own functions (it may make a tensor), and an element that a flat
#: container or a hashed one gets.
_CALL, _OWN_CALL, _FLAT_ELEMENT, _HASHED_ELEMENT = 200, 300, 10, 100
#: A deque has a block of elements from the beginning.
_DEQUE = 700
_FLAT = (list, tuple, collections.deque, torch.Size)
_SETS = (set, frozenset, collections.Counter)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_FROM_SCALARS = (bool, complex, float, int, str, range)
_FROM_CONTAINERS = (*_CONTAINERS, io.BytesIO)

#: Classes of a pickle's values whose attributes a pickle may give: by a dict, never by slots.
_WITH_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace)
_WITH_EXTRA_ATTRIBUTES = (collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter)
_LIBRARIES = ("builtins", "collections", "numpy", "shardckpt_torch_dist", "torch")


def check_arguments(function: Any, args: Any) -> int:
    """Refuse arguments that a call would blow up; returns about how many bytes the call takes."""
    if type(args) is not tuple:
        raise CorruptCheckpointError(f"a pickle calls {brief(function)} with a {type(args).__name__} as its arguments")
    if isinstance(function, Marker):
        raise UnsafePickleError(f"a pickle calls {function!r}: refused")
    if isinstance(function, Shield):
        return _sizes(args, _FLAT_ELEMENT) if function.copies else _OWN_CALL
    if not isinstance(function, type):
        return _CALL
    if function in _FROM_SCALARS or function is slice:
        allowed: tuple[type, ...] = _SCALARS
    elif function in _FROM_CONTAINERS:
        allowed = (*_SCALARS, *_CONTAINERS, type, Shield)
    else:
        return _CALL
    for arg in args:
        if type(arg) in allowed or (type in allowed and isinstance(arg, type)):
            continue
        if function is not slice or isinstance(arg, (slice, *_CONTAINERS)):  # slices of numpy's numbers are fine
            raise CorruptCheckpointError(f"a pickle makes a {function.__name__} of a {type(arg).__name__}: refused")
    empty = _DEQUE if function is collections.deque else 0
    return empty + _sizes(args, _FLAT_ELEMENT if function in _FLAT else _HASHED_ELEMENT)


def _sizes(args: tuple[Any, ...], element: int) -> int:
    texts = sum(len(arg) for arg in args if type(arg) in _TEXTS)
    return _CALL + texts + element * sum(len(arg) for arg in args if type(arg) in _CONTAINERS)


def keys_of(function: Any, args: tuple[Any, ...]) -> list[Any]:
    """The keys that a call of a class of dicts or sets hashes."""
    containers = [arg for arg in args if type(arg) in _CONTAINERS]
    if function in _SETS:
        return [key for container in containers for key in container]
    if function not in _DICTS:
        return []
    pairs = [pair for each in containers if not isinstance(each, dict) for pair in each]
    keys = [pair[0] for pair in pairs if type(pair) in (list, tuple) and pair]
    return keys + [key for each in containers if isinstance(each, dict) for key in each]


class Collisions:
    """Counts comparisons of keys whose hashes are equal, which a pickle can choose: they take time by the square.

    Args:
        nbytes: Of the pickle.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = (1 << 20) + nbytes
        self._seen: dict[int, tuple[Any, dict[int, int]]] = {}

    def add(self, container: Any, keys: Iterable[Any]) -> None:
        """Refuse keys too many of which are compared with those that the container, or None for a new one, has."""
        odd = [key for key in keys if type(key) not in (str, bytes, bool)]
        if not odd:
            return
        _, seen = (None, {}) if container is None else self._seen.setdefault(id(container), (container, {}))
        for key in odd:
            code = hash(key)
            equal = seen.get(code, 0)
            seen[code] = equal + 1
            self._left -= equal
        if self._left < 0:
            raise CorruptCheckpointError("the pickle has too many keys that have the same hash")


class Nesting:
    """How deep those values lie in each other that C frees by recursion without a limit: it would end on the stack."""

    #: How deep they may lie, and how often one that lies in another may still get one.
    _DEEPEST, _LATE = 100, 64

    def __init__(self) -> None:
        self._heights: dict[int, tuple[Any, int]] = {}  # has the values: their ids stay theirs
        self._held: set[int] = set()
        self._late = 0

    def add(self, holder: Any, values: Iterable[Any]) -> None:
        """Refuse what lies too deep once the holder, if it is one of them, has the values."""
        inner = [value for value in values if _recurses(value)] if _recurses(holder) else []
        if not inner:
            return
        height = max(self._height(holder), 1 + max(map(self._height, inner)))
        self._heights[id(holder)] = holder, height
        self._late += id(holder) in self._held
        for value in inner:
            self._heights.setdefault(id(value), (value, 1))
            self._held.add(id(value))
        if height > self._DEEPEST or self._late > self._LATE:
            raise CorruptCheckpointError(
                f"the pickle has a {type(holder).__name__} in which others lie more than {self._DEEPEST} deep"
            )

    def _height(self, value: Any) -> int:
        return self._heights.get(id(value), (value, 1))[1]


def _recurses(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # without it there is no array
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return isinstance(value, (collections.deque, collections.defaultdict)) or (is_array and value.dtype.hasobject)


def values_of(made: Any) -> Iterable[Any]:
    """What a container that a call has made holds."""
    if isinstance(made, dict):
        return made.values()
    return made if isinstance(made, collections.deque) else ()


def check_container(target: Any) -> None:
    """Refuse to put values into what is no container."""
    if isinstance(target, (type, Shield, torch.Tensor)) or type(target).__module__.partition(".")[0] == "numpy":
        raise UnsafePickleError(f"a pickle tries to put values into {brief(target)}: refused")


def give_state(target: Any, state: Any, own: Callable[[Any], bool]) -> bool:
    """Give a value its pickled attributes.

    Args:
        target: The value.
        state: What the pickle gives it.
        own: Whether a class is one that the caller allows, or an inert stand-in.

    Returns:
        False where the value's own way of taking a state is to be used.

    Raises:
        UnsafePickleError: Classes, functions and values of libraries take no state from a pickle.
    """
    kind = type(target)
    if kind in _WITH_ATTRIBUTES or kind in _WITH_EXTRA_ATTRIBUTES:
        hidden = kind in _WITH_EXTRA_ATTRIBUTES
        if type(state) is not dict or any(not isinstance(k, str) or (hidden and hasattr(kind, k)) for k in state):
            raise UnsafePickleError(f"a pickle tries to change a {kind.__name__} itself: refused")
        target.__dict__.update(state)
        return True
    library = kind.__module__.partition(".")[0] in _LIBRARIES
    function = isinstance(target, (type, Shield, types.FunctionType, types.BuiltinFunctionType, types.MethodType))
    if function or (library and kind is not io.BytesIO and not own(kind)):
        raise UnsafePickleError(f"a pickle tries to change {brief(target)}: refused")
    slots = state[1] if isinstance(state, tuple) and len(state) == 2 else None  # noqa: PLR2004 - (state, slot state)
    for name in (*(state if isinstance(state, dict) else ()), *(slots if isinstance(slots, dict) else ())):
        if isinstance(name, str) and name.startswith("__") and name.endswith("__"):
            raise UnsafePickleError(f"a pickle tries to set {brief(name)} of a {kind.__name__}: refused")
    return False


__all__ = [
    "Collisions",
    "Marker",
    "Nesting",
    "Shield",
    "Unbuilt",
    "brief",
    "check_arguments",
    "check_container",
    "give_state",
    "keys_of",
    "shielded",
    "values_of",
]
