"""Limit the calls of a pickle with globals of the allow-list, its states, and the memory that they may take.

Each limit refuses small pickles that would take much memory, time or C stack: see tests/faults/test_pickle_bombs.py.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
import sys
import types
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CorruptCheckpointError, UnsafePickleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

#: The longest tuple that an error shows.
_SHORT = 16


def describe(value: Any) -> str:
    """Return a value as text for an error: the repr of a plain value, the type of any other, whose repr may not end."""
    if type(value) in (tuple, list) and len(value) <= _SHORT and all(type(item) in _SCALARS for item in value):
        return f"({', '.join(map(describe, value))})"
    if type(value) in (str, bytes):
        return f"{value[:80]!r}"
    if isinstance(value, (type, FunctionProxy, OpaqueClass, PendingValue, bool, float, types.NoneType)):
        return f"{value!r:.80}"
    if type(value) is int and abs(value) < 1 << 64:
        return f"{value}"
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__name__}"


class FunctionProxy:
    """A function that a pickle may call, and whose attributes (defaults, code) it cannot reach.

    If it ``copies``, its result is as large as its arguments, so that the call counts against the copy limit.
    """

    __slots__ = ("_function", "copies")
    _function: Callable[..., Any]
    copies: bool

    def __init__(self, function: Callable[..., Any], *, copies: bool = False) -> None:
        object.__setattr__(self, "_function", function)
        object.__setattr__(self, "copies", copies)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafePickleError(f"a pickle tries to set {name!r} of a function: refused")


class OpaqueClass:
    """A class that a pickle may pass as an argument, but neither call nor change."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"<{self._name}, as a name>"


class OuterClass(OpaqueClass):
    """A class of which only classes inside it are allowed: pickles of protocols below 4 name it first, then them."""

    __slots__ = ("home",)

    def __init__(self, module: str, name: str) -> None:
        super().__init__(f"itself not in allow_globals: {module}.{name}")
        self.home = module, name


class _StandInFinder(pickle.Pickler):
    """Visits all that a value holds; its output is of no use."""

    has_stand_in = False

    def persistent_id(self, value: Any) -> str | None:
        self.has_stand_in |= isinstance(value, (FunctionProxy, OpaqueClass))
        return "skipped" if isinstance(value, (FunctionProxy, OpaqueClass, torch.Tensor, bytes, bytearray)) else None


def has_stand_in(value: Any) -> bool:
    """Return whether a loaded value holds one of these objects in the place of a class or function."""
    finder = _StandInFinder(io.BytesIO())
    with suppress(Exception):  # of a class that the caller allows under another name, and that no pickle can name
        finder.dump(value)
    return finder.has_stand_in


class PendingValue:
    """A value that REDUCE created and that still waits for its state: BUILD replaces it by ``build(state)``.

    ``keys`` are its keys in the unpickler's memo.
    """

    __slots__ = ("_what", "build", "keys")

    def __init__(self, what: str, build: Callable[[Any], Any]) -> None:
        self._what = what
        self.build = build
        self.keys: list[int] = []

    def __repr__(self) -> str:
        return f"<{self._what} without its state>"


_NO_BYTES = (bool, int, float, complex, str, type(None))
_SCALARS = (*_NO_BYTES, bytes)
_CONTAINERS = (
    *(list, tuple, set, frozenset, dict, bytearray, torch.Size),
    *(collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter),
)
_TEXTS = (str, bytes, bytearray, memoryview)
#: Estimates of memory in bytes: of the result of a call, of a call of our own functions (it may make a tensor), of an
#: element in a flat container, and of one in a hashed container.
_CALL, _OWN_CALL, _FLAT_ELEMENT, _HASHED_ELEMENT = 200, 300, 10, 100
#: Bytes of an empty deque: it allocates its first block of elements at once.
_DEQUE = 700
_FLAT = (list, tuple, collections.deque, torch.Size)
_SETS = (set, frozenset, collections.Counter)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)
_FROM_SCALARS = (bool, complex, float, int, str, range)
_FROM_CONTAINERS = (*_CONTAINERS, io.BytesIO)

#: Classes whose instances take attributes from a pickle: by a dict, never by slots.
_WITH_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace)
_WITH_EXTRA_ATTRIBUTES = (collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter)
_LIBRARIES = ("builtins", "collections", "numpy", "shardckpt", "torch")


def check_arguments(function: Any, args: Any) -> int:
    """Return about how many bytes a call that a pickle makes takes, after a check of its arguments.

    A result that could be much larger than the arguments is a CorruptCheckpointError, a function that may only be
    named, not called, an UnsafePickleError.
    """
    if type(args) is not tuple:
        raise CorruptCheckpointError(
            f"a pickle calls {describe(function)} with a {type(args).__name__} as its arguments"
        )
    if isinstance(function, OpaqueClass):
        raise UnsafePickleError(f"a pickle calls {function!r}: refused")
    if isinstance(function, FunctionProxy):
        return _sizes(args, _FLAT_ELEMENT) if function.copies else _OWN_CALL
    if not isinstance(function, type):
        return _CALL
    if function in _FROM_SCALARS or function is slice:
        # a str of bytes would be decoded by a codec of the pickle's choice, and punycode takes quadratic time
        allowed: tuple[type, ...] = _NO_BYTES if function is str else _SCALARS
    elif function in _FROM_CONTAINERS:
        allowed = (*_SCALARS, *_CONTAINERS, type, FunctionProxy)
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


def list_hashed_keys(function: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the keys that a call of a dict or set class hashes."""
    containers = [arg for arg in args if type(arg) in _CONTAINERS]
    if function in _SETS:
        return [key for container in containers for key in container]
    if function not in _DICTS:
        return []
    pairs = [pair for each in containers if not isinstance(each, dict) for pair in each]
    keys = [pair[0] for pair in pairs if type(pair) in (list, tuple) and pair]
    return keys + [key for each in containers if isinstance(each, dict) for key in each]


class Collisions:
    """Limits the comparisons of keys with equal hashes in a pickle of some bytes."""

    def __init__(self, nbytes: int) -> None:
        self._left = (1 << 20) + nbytes  # a pickle can choose such keys, and n of them take n² comparisons
        self._seen: dict[int, tuple[Any, dict[int, int]]] = {}

    def add(self, container: Any, keys: Iterable[Any]) -> None:
        """Count the keys that a container (None: a new one) gets.

        Too many keys of the pickle with equal hashes are a CorruptCheckpointError.
        """
        # The hashes of str and bytes are salted, and there are only two bools: a pickle cannot choose equal ones.
        choosable = [key for key in keys if type(key) not in (str, bytes, bool)]
        if not choosable:
            return
        # Keeping the container alive keeps its id from being reused.
        _, seen = (None, {}) if container is None else self._seen.setdefault(id(container), (container, {}))
        for key in choosable:
            code = hash(key)
            equal = seen.get(code, 0)
            seen[code] = equal + 1
            self._left -= equal
        if self._left < 0:
            raise CorruptCheckpointError("the pickle has too many keys that have the same hash")


class Nesting:
    """Limits the nesting of deques, defaultdicts and object arrays."""

    # C frees these by unlimited recursion: deep nesting would overflow the C stack and kill the process.

    #: The deepest nesting, and how often a container that already lies in another may get one more container.
    _DEEPEST, _LATE = 100, 64

    def __init__(self) -> None:
        self._heights: dict[int, tuple[Any, int]] = {}  # holding the values keeps their ids from being reused
        self._held: set[int] = set()
        self._late = 0

    def add(self, holder: Any, values: Iterable[Any]) -> None:
        """Note that a value now holds others; CorruptCheckpointError if they are nested too deep."""
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
                f"the pickle has a {type(holder).__name__} with others nested more than {self._DEEPEST} deep in it"
            )

    def _height(self, value: Any) -> int:
        return self._heights.get(id(value), (value, 1))[1]


def _recurses(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # not imported: the pickle has no array
    is_array = numpy is not None and isinstance(value, numpy.ndarray)
    return isinstance(value, (collections.deque, collections.defaultdict)) or (is_array and value.dtype.hasobject)


def list_values(made: Any) -> Iterable[Any]:
    """Return the values of a new container, for :class:`Nesting`."""
    if isinstance(made, dict):
        return made.values()
    return made if isinstance(made, collections.deque) else ()


def check_container(target: Any) -> None:
    """Raise UnsafePickleError if a pickle adds values to an object that is no container."""
    if isinstance(target, (type, FunctionProxy, torch.Tensor)) or type(target).__module__.partition(".")[0] == "numpy":
        raise UnsafePickleError(f"a pickle tries to put values into {describe(target)}: refused")


def apply_state(target: Any, state: Any, is_allowed: Callable[[Any], bool]) -> bool:
    """Set the pickled attributes of a value, the argument of BUILD, or check that pickle's own BUILD may set them.

    Returns whether they are set. ``is_allowed`` returns whether a class is one that the caller allows, or an inert
    stub. Other classes, functions and values of libraries take no state from a pickle: UnsafePickleError.
    """
    kind = type(target)
    if kind in _WITH_ATTRIBUTES or kind in _WITH_EXTRA_ATTRIBUTES:
        hidden = kind in _WITH_EXTRA_ATTRIBUTES
        if type(state) is not dict or any(not isinstance(k, str) or (hidden and hasattr(kind, k)) for k in state):
            raise UnsafePickleError(f"a pickle tries to change a {kind.__name__} itself: refused")
        target.__dict__.update(state)
        return True
    library = kind.__module__.partition(".")[0] in _LIBRARIES
    functions = (FunctionProxy, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    if isinstance(target, (type, *functions)) or (library and kind is not io.BytesIO and not is_allowed(kind)):
        raise UnsafePickleError(f"a pickle tries to change {describe(target)}: refused")
    slots = state[1] if isinstance(state, tuple) and len(state) == 2 else None  # noqa: PLR2004 - (state, slot state)
    for name in (*(state if isinstance(state, dict) else ()), *(slots if isinstance(slots, dict) else ())):
        if isinstance(name, str) and name.startswith("__") and name.endswith("__"):
            raise UnsafePickleError(f"a pickle tries to set {describe(name)} of a {kind.__name__}: refused")
    return False
