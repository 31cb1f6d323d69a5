"""Inert stand-ins for the classes of other libraries that a pickle names."""

from __future__ import annotations

import copy
import copyreg
import functools
import pickle
import sys
from typing import TYPE_CHECKING, Any, cast

from shardckpt.errors import UnsafePickleError
from shardckpt_torch_dist.archive.pickle_policy import brief

if TYPE_CHECKING:
    from typing_extensions import Self


_RECONSTRUCT = copyreg._reconstructor  # type: ignore[attr-defined]  # noqa: SLF001 - pickles of protocol 0 name it


class Frozen(type):
    """A metaclass whose classes refuse new attributes: a pickle's BUILD on the class itself does nothing."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafePickleError(f"a pickle tries to change the class {cls.__name__}: refused")


class _StandInClass(Frozen):
    """The class of stand-in classes, which cannot be pickled by their name."""


class StandIn(metaclass=_StandInClass):
    """An inert object in place of one whose class is not ours to run: keeps what the pickle says of it.

    Saved again, it is what it was, as long as the real class is imported in the saving process.

    Attributes:
        origin: Module and name of the class.
        args: What it would have been called with.
        kwargs: The same by name.
        state: Its pickled attributes; they can be read as attributes of the stand-in.
    """

    origin = ""
    home = ("", "")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """An instance, whatever the pickle would have called the class with."""
        self = super().__new__(cls)
        vars(self).update(args=args, kwargs=kwargs, state={}, called=False)
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        vars(self)["called"] = True  # and not only made by __new__: it is to be saved so again

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"the stand-in for {self.origin} has no {name!r}")

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self).setdefault("items", {})[key] = value

    def append(self, value: Any) -> None:
        """Take a value of a list subclass."""
        vars(self).setdefault("values", []).append(value)

    def extend(self, values: Any) -> None:
        """Take values of a list subclass."""
        vars(self).setdefault("values", []).extend(values)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)()
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        real = _real(type(self))
        values, items = vars(self).get("values", ()), vars(self).get("items", {})
        rest = (self.state or None, iter(values) if values else None, iter(items.items()) if items else None)
        if self.called:
            return (real, self.args, *rest)
        if self.args or self.kwargs or getattr(real, "__new__", None) is not object.__new__:
            raise _cannot_be_saved(type(self))
        return (_RECONSTRUCT, (real, object, None), *rest)

    def __repr__(self) -> str:
        return f"<stand-in for {self.origin}{brief(self.args)}>"


def _real(kind: Any) -> Any:
    """The class that a stand-in stands for, if the process has imported it already."""
    module, name = kind.home
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, "__dict__", {}).get(part)  # getattr(module, part) may import, as the checkpoint chooses
    if found is None:
        raise _cannot_be_saved(kind)
    return found


def _cannot_be_saved(kind: Any) -> pickle.PicklingError:
    return pickle.PicklingError(
        f"{kind.origin} was loaded as an inert stand-in, because shardckpt does not import what a checkpoint names, "
        f"and this stand-in cannot be saved: import {kind.home[0]} before saving, load with allow_globals=[...] to get "
        "the real object, or put a plain value in its place"
    )


def _refuse_class(kind: Any) -> Any:
    raise _cannot_be_saved(kind)


copyreg.pickle(_StandInClass, _refuse_class)


@functools.cache
def stand_in(module: str, name: str) -> type[StandIn]:
    """The stand-in class for a class of another library."""
    names = {"origin": f"{module}.{name}", "home": (module, name)}
    return cast("type[StandIn]", _StandInClass(name.rpartition(".")[2], (StandIn,), names))


__all__ = ["Frozen", "StandIn", "stand_in"]
