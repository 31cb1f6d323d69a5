"""Inert stubs for values of classes that a checkpoint names and that are not imported.

A load must not import the names in a checkpoint: importing runs code. So instances of such classes become stubs that
keep the stored content, and that are saved again under the name of the real class.
"""

from __future__ import annotations

import copy
import copyreg
import pickle
import sys
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

from shardckpt.errors import UnsafePickleError

if TYPE_CHECKING:
    from typing_extensions import Self


#: The most arguments that a repr shows.
_MOST_SHOWN = 16

_RECONSTRUCT = copyreg._reconstructor  # type: ignore[attr-defined]  # noqa: SLF001 - pickles of protocol 0 name it


class Frozen(type):
    """A metaclass whose classes refuse new attributes, so that a pickle's BUILD cannot change the class itself."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafePickleError(f"a pickle tries to change the class {cls.__name__}: refused")


class _StubMeta(Frozen):
    """The metaclass of stubs: a stub class itself cannot be pickled, see :func:`_refuse_class`."""


class Stub(metaclass=_StubMeta):
    """An inert object in place of an instance of another library's class. It keeps the stored content.

    It can be pickled if the real class is imported in the saving process, and is then an instance of that class. In
    place of a member of an enum it has the member's ``name`` and ``value``, as far as they are stored. Attributes that
    are set are pickled, too.

    Attributes:
        origin: "module.name" of the real class.
        home: The same as (module, name).
        args: The positional arguments of the constructor.
        kwargs: Its keyword arguments.
        state: The pickled attributes, usually a dict; an empty mapping that cannot be changed where there are none.
            They can be read and set as attributes of the stub.
    """

    origin = ""
    home = ("", "")
    #: The state of a stub whose pickle has none; an empty state, or 0, may mean something to the real class.
    state: Any = MappingProxyType({})

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a stub with any arguments, and keep them."""
        self = super().__new__(cls)
        vars(self).update(args=args, kwargs=kwargs, called=False)
        return self

    def __init__(self, *_: Any, **__: Any) -> None:
        vars(self)["called"] = True  # the pickle called the class, not only __new__: pickled again, it does so too

    @classmethod
    def for_member(cls, name: str | None, *values: Any) -> Self:
        """Return a stub for a member of an enum: by its name, and its value if that is known."""
        self = cls(*values)
        vars(self).update({"name": name, "value": values[0]} if values else {"name": name})
        return self

    def __setstate__(self, state: Any) -> None:
        vars(self)["state"] = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"the stub for {self.origin} has no {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        state = vars(self).get("state", None if self.args else {})
        if name in ("args", "kwargs", "state"):
            vars(self)[name] = value
        elif isinstance(state, dict) and not hasattr(type(self), name) and name not in vars(self):
            vars(self)["state"] = {**state, name: value}  # an attribute of the stub's own would not be pickled
        else:
            raise AttributeError(f"{name!r} of the stub for {self.origin} cannot be set, since it would not be saved")

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self).setdefault("items", {})[key] = value

    def append(self, value: Any) -> None:
        """Keep an item that the pickle appends to a list subclass."""
        vars(self).setdefault("values", []).append(value)

    def extend(self, values: Any) -> None:
        """Keep the items that the pickle appends to a list subclass."""
        vars(self).setdefault("values", []).extend(values)

    # The copy module would use __reduce_ex__, which needs the real class, and makes an instance of it.
    def __copy__(self) -> Self:
        new = type(self)()
        vars(new).update(
            (name, copy.copy(own) if type(own) in (dict, list) else own) for name, own in vars(self).items()
        )
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = type(self)()
        memo[id(self)] = new
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        real = find_imported(*type(self).home)
        if real is None:  # the class must be imported already
            raise _unsaveable(type(self))
        if "name" in vars(self) and not self.args:  # a member of an enum, by its name
            return getattr, (real, vars(self)["name"])
        values, items = vars(self).get("values", ()), vars(self).get("items", {})
        rest = (vars(self).get("state"), iter(values) if values else None, iter(items.items()) if items else None)
        if self.called:
            return (real, self.args, *rest)
        # The pickle called only __new__. copyreg's function can repeat that for a class with object's own __new__.
        if self.args or self.kwargs or getattr(real, "__new__", None) is not object.__new__:
            raise _unsaveable(type(self))
        return (_RECONSTRUCT, (real, object, None), *rest)

    def __repr__(self) -> str:
        return f"<stub for {self.origin}({', '.join(map(_show, self.args[:_MOST_SHOWN]))})>"


def _show(value: Any) -> str:
    """Return a plain value as text, of any other its class: the repr of a value of a stranger may not end."""
    short = type(value) is int and abs(value) < 1 << 64
    if short or type(value) in (bool, float, str, bytes, type(None)):
        return f"{value!r:.80}"
    return f"a {type(value).__name__}"


def find_imported(module: str, name: str) -> Any:
    """Return the attribute of an imported module under a name with dots, or None. Nothing is imported here."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        # getattr(module, part) could import a module that the checkpoint chooses
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _unsaveable(kind: Any) -> pickle.PicklingError:
    return pickle.PicklingError(
        f"{kind.origin} was loaded as an inert stub, because shardckpt imports no class that a checkpoint names, and "
        f"this stub cannot be saved: import {kind.home[0]} before saving, load with allow_globals=[...] to get the "
        "real object, put a plain value in its place, or leave it out (convert --leave-out)"
    )


def _refuse_class(kind: Any) -> Any:
    raise _unsaveable(kind)


copyreg.pickle(_StubMeta, _refuse_class)


#: The stub classes by module and name, for as long as something has them: checkpoints choose the names.
_classes: WeakValueDictionary[tuple[str, str], type[Stub]] = WeakValueDictionary()
_lock = threading.Lock()


def make_stub_class(module: str, name: str) -> type[Stub]:
    """Return the stub class for a class of another library; always the same one for a name."""
    found = _classes.get((module, name))
    if found is None:
        made = _make_class(module, name)
        with _lock:  # of two threads that make one
            found = _classes.setdefault((module, name), made)
    return found


def _make_class(module: str, name: str) -> type[Stub]:
    names = {"origin": f"{module}.{name}", "home": (module, name)}
    # a class of Python cannot have every name that a pickle can
    shown = name.rpartition(".")[2].replace("\0", r"\0").encode(errors="backslashreplace").decode()
    return cast("type[Stub]", _StubMeta(shown, (Stub,), names))
