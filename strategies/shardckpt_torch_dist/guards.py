"""What a pickle may do with what it got: which calls, which states, and how much memory they may take."""

from __future__ import annotations

import argparse
import collections
import io
import types
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CorruptCheckpointError, UnsafePickleError

if TYPE_CHECKING:
    from collections.abc import Callable


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
_SIZED = (*_CONTAINERS, str, bytes, memoryview)
_FROM_SCALARS = (bool, complex, float, int, str, range)
_FROM_CONTAINERS = (*_CONTAINERS, io.BytesIO)

#: Classes of a pickle's values whose attributes a pickle may give: by a dict, never by slots.
_WITH_ATTRIBUTES = (argparse.Namespace, types.SimpleNamespace)
_WITH_EXTRA_ATTRIBUTES = (collections.OrderedDict, collections.defaultdict, collections.deque, collections.Counter)
_LIBRARIES = ("builtins", "collections", "numpy", "shardckpt_torch_dist", "torch")


def check_arguments(function: Any, args: Any) -> int:
    """Refuse arguments that a call would blow up; returns how many elements the call copies."""
    if type(args) is not tuple:
        raise CorruptCheckpointError(f"a pickle calls {function!r} with a {type(args).__name__} as its arguments")
    if isinstance(function, Marker):
        raise UnsafePickleError(f"a pickle calls {function!r}: refused")
    if function in _FROM_SCALARS:
        allowed: tuple[type, ...] = _SCALARS
    elif function in _FROM_CONTAINERS:
        allowed = (*_SCALARS, *_CONTAINERS, type, Shield)
    else:
        return _sizes(args) if isinstance(function, Shield) and function.copies else 0
    for arg in args:
        if type(arg) not in allowed and not (type in allowed and isinstance(arg, type)):
            raise CorruptCheckpointError(f"a pickle makes a {function.__name__} of a {type(arg).__name__}: refused")
    return _sizes(args)


def _sizes(args: tuple[Any, ...]) -> int:
    return sum(len(arg) for arg in args if type(arg) in _SIZED)


def check_container(target: Any) -> None:
    """Refuse to put values into what is no container."""
    if isinstance(target, (type, Shield, torch.Tensor)) or type(target).__module__.partition(".")[0] == "numpy":
        raise UnsafePickleError(f"a pickle tries to put values into {target!r:.80}: refused")


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
        raise UnsafePickleError(f"a pickle tries to change {target!r:.80}: refused")
    slots = state[1] if isinstance(state, tuple) and len(state) == 2 else None  # noqa: PLR2004 - (state, slot state)
    for name in (*(state if isinstance(state, dict) else ()), *(slots if isinstance(slots, dict) else ())):
        if isinstance(name, str) and name.startswith("__") and name.endswith("__"):
            raise UnsafePickleError(f"a pickle tries to set {name!r} of a {kind.__name__}: refused")
    return False


__all__ = ["Marker", "Shield", "Unbuilt", "check_arguments", "check_container", "give_state", "shielded"]
