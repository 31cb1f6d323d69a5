"""The one guarded reader of pickles: globals come from an allow-list or not at all, and there is no other path.

What a pickle would cost is known from its opcodes, before anything is built (shardckpt/storage/opcodes.py); what only
its values can show is checked while the one in Python builds them.
"""

from __future__ import annotations

import _compat_pickle
import functools
import io
import pickle
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError
from shardckpt.storage import check_pickle
from shardckpt_torch_dist.archive.globals import (
    METADATA_TABLE,
    OBJECT_TABLE,
    STAND_IN_PACKAGES,
    Table,
)
from shardckpt_torch_dist.archive.numpy_globals import copied_bytes, numpy_global, objects_of
from shardckpt_torch_dist.archive.pickle_policy import (
    Collisions,
    Nesting,
    Unbuilt,
    brief,
    check_arguments,
    check_container,
    give_state,
    keys_of,
    values_of,
)
from shardckpt_torch_dist.archive.stubs import StandIn, stand_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    _Storage = Callable[[Any], Any]

#: How many bytes the calls of a pickle may copy: so many in any case, and so many for each of its own.
_FREE, _COPIES = 16 << 20, 64


class _AllowList:
    """Resolves globals from a table; ``more`` is asked for what it lacks."""

    table: Table
    source: str
    more: Callable[[str, str], Any] | None = None

    def find_class(self, module: str, name: str) -> Any:
        module, name = _python3(module, name)
        found = self.table.get((module, name))
        if found is None and self.more is not None:
            found = self.more(module, name)
        if found is None and module == "torch":
            dtype = vars(torch).get(name)  # getattr would import what torch loads lazily, by the pickle's choice
            found = dtype if isinstance(dtype, torch.dtype) else None
        if found is None:
            raise UnsafePickleError(
                f"{self.source}: the pickle asks for {module}.{name}, which is not on the allow-list; nothing was "
                f"run. If you trust whoever wrote the checkpoint, pass allow_globals=[{name.rpartition('.')[2]}] with "
                f'that class or function of {module}, or [(it, "{module}.{name}")] if it does not go by that name'
            )
        return found


class _MetadataUnpickler(_AllowList, pickle.Unpickler):
    """The fast one, for the many records of ``.metadata``; nothing in its table is changed by a BUILD."""

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data))
        self.table, self.source = METADATA_TABLE, source

    def persistent_load(self, pid: Any) -> Any:
        raise CorruptCheckpointError(
            f"{self.source}: a pickle outside an archive refers to a tensor storage: {brief(pid)}"
        )


class _Memo(dict[int, Any]):
    """A memo in which what is not built yet knows its places."""

    def __setitem__(self, key: int, value: Any) -> None:
        if isinstance(value, Unbuilt):
            value.keys.append(key)
        super().__setitem__(key, value)

    def __getitem__(self, key: int) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, Unbuilt):
            raise CorruptCheckpointError(f"the pickle uses {value!r}: an array that holds itself is not supported")
        return value


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001 - only this one lets its opcodes be guarded


class _ObjectUnpickler(_AllowList, _PythonUnpickler):  # type: ignore[misc]
    """The one in Python, whose calls, states and sizes are checked, for objects and common state."""

    def __init__(self, data: bytes, source: str, extra: Callable[[str, str], Any], storage: _Storage) -> None:
        super().__init__(io.BytesIO(data))
        self.table, self.source, self.more = OBJECT_TABLE, source, extra
        self.memo = _Memo()
        self.stack: list[Any] = []
        self._size = len(data)
        self._left = _FREE + _COPIES * len(data)
        self._collisions = Collisions(len(data))
        self._nesting = Nesting()
        self._storage = storage
        self._made_of: set[type] = set()
        self._unbuilt: set[Unbuilt] = set()

    def load(self) -> Any:
        loaded = super().load()
        if self._unbuilt:
            raise CorruptCheckpointError(f"{self.source}: the pickle ends with {self._unbuilt.pop()!r}")
        return loaded

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if isinstance(found, type) and found not in self.table.values():
            self._made_of.add(found)
        return found

    def get_extension(self, code: int) -> Any:
        raise CorruptCheckpointError(f"{self.source}: the pickle has extension code {code}, which nothing registers")

    def _spend(self, nbytes: int) -> None:
        """Count what calls copy: a pickle that copies much more than it has wants to fill the memory."""
        self._left -= nbytes
        if self._left < 0:
            raise CorruptCheckpointError(f"{self.source}: the pickle of {self._size} bytes copies itself too often")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        made = self.stack[-1] = self._made(self.stack[-1], args, self.stack[-1])
        if isinstance(made, Unbuilt):
            self._unbuilt.add(made)

    def _made(self, function: Any, args: Any, call: Callable[..., Any], *first: Any) -> Any:
        """What a call of a function or class gives, once its arguments are known to be harmless."""
        self._spend(check_arguments(function, args))
        if isinstance(function, type):
            self._collisions.add(None, keys_of(function, args))
        made = call(*first, *args)
        self._nesting.add(made, values_of(made))
        return made

    def load_newobj(self) -> None:
        self.stack.append({})
        self.load_newobj_ex()

    def load_newobj_ex(self) -> None:
        names, args, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if not isinstance(kind, type) or type(names) is not dict:
            raise UnsafePickleError(f"the pickle makes an object of {brief(kind)}, which is no class: refused")
        self._spend(check_arguments(kind, tuple(names.values())))
        self.stack.append(self._made(kind, args, functools.partial(kind.__new__, **names), kind))

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.stack.append(self._made(klass, tuple(args), klass))

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Unbuilt):
            self._spend(copied_bytes(state))
            built = self.stack[-1] = target.build(state)
            self._nesting.add(built, objects_of(state))
            self.memo.update(dict.fromkeys(target.keys, built))
            self._unbuilt.discard(target)
        elif not give_state(target, state, self._is_own):
            self.stack.append(state)
            super().load_build()

    def _is_own(self, kind: type) -> bool:
        return kind in self._made_of or issubclass(kind, StandIn)

    def load_append(self) -> None:
        self._put(self.stack[-2], [self.stack[-1]])
        super().load_append()

    def load_appends(self) -> None:
        self._put(self.metastack[-1][-1], self.stack)
        super().load_appends()

    def load_setitem(self) -> None:
        self._put(self.stack[-3], [self.stack[-1]], [self.stack[-2]])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._put(self.metastack[-1][-1], self.stack[1::2], self.stack[::2])
        super().load_setitems()

    def load_additems(self) -> None:
        self._put(self.metastack[-1][-1], (), self.stack)
        super().load_additems()

    def load_dict(self) -> None:
        self._collisions.add(None, self.stack[::2])
        super().load_dict()

    def load_frozenset(self) -> None:
        self._collisions.add(None, self.stack)
        super().load_frozenset()

    def _put(self, target: Any, values: Iterable[Any], keys: Iterable[Any] = ()) -> None:
        """Check what goes into a container."""
        check_container(target)
        self._collisions.add(target, keys)
        self._nesting.add(target, values)

    def load_bytearray8(self) -> None:
        size = int.from_bytes(self.read(8), "little")
        content = self.read(size) if size <= self._size else b""
        if len(content) != size:
            raise CorruptCheckpointError(f"{self.source}: the pickle has no {size} bytes for a bytearray")
        self.stack.append(bytearray(content))

    dispatch: ClassVar = {
        **_PythonUnpickler.dispatch,
        pickle.REDUCE[0]: load_reduce,
        pickle.NEWOBJ[0]: load_newobj,
        pickle.NEWOBJ_EX[0]: load_newobj_ex,
        pickle.BUILD[0]: load_build,
        pickle.APPEND[0]: load_append,
        pickle.APPENDS[0]: load_appends,
        pickle.SETITEM[0]: load_setitem,
        pickle.SETITEMS[0]: load_setitems,
        pickle.ADDITEMS[0]: load_additems,
        pickle.DICT[0]: load_dict,
        pickle.FROZENSET[0]: load_frozenset,
        pickle.BYTEARRAY8[0]: load_bytearray8,
    }


def load_metadata(data: bytes, source: str) -> Any:
    """What a ``.metadata`` file says, as inert records with the attributes of DCP's classes."""
    check_pickle(data, source, plain=True)
    return _load(_MetadataUnpickler(data, source), source)


def load_object(
    data: bytes,
    source: str,
    torch_global: Callable[[str, str], Any],
    storage: _Storage,
    allow_globals: Iterable[Any] = (),
) -> Any:
    """What the pickle inside a ``torch.save`` archive says.

    Args:
        data: The pickle.
        source: Named in errors.
        torch_global: Gives the functions that rebuild tensors, or None.
        storage: Turns a persistent id into a storage.
        allow_globals: Classes and functions that the caller allows, besides torch's registered safe globals; each
            by itself, or as (class or function, "module.name").
    """
    allowed = functools.cache(lambda: _allowed(allow_globals))  # hardly any pickle needs it

    def extra(module: str, name: str) -> Any:
        ours = torch_global(module, name) or numpy_global(module, name)
        if ours is not None:  # whatever is allowed: numpy's own corrupt memory
            return ours
        if (module, name) in allowed():
            return allowed()[module, name]
        return stand_in(module, name) if module.partition(".")[0] in STAND_IN_PACKAGES else None

    check_pickle(data, source)
    return _load(_ObjectUnpickler(data, source, extra, storage), source)


def _python3(module: str, name: str) -> tuple[str, str]:
    """A global by its name of today: pickles of protocol 2, as torch writes them, name builtins as Python 2 did."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _allowed(allow_globals: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """What the user allows, by the (module, name) that pickles write."""
    registered = filter(_of_the_user, map(_named, torch.serialization.get_safe_globals()))
    return dict((*registered, *map(_named, allow_globals)))


def _named(item: Any) -> tuple[tuple[str, str], Any]:
    """The (module, name) that a pickle writes for an allowed global, and the global."""
    if isinstance(item, tuple):
        module, _, name = item[1].rpartition(".")
        return (module, name), item[0]
    return (getattr(item, "__module__", ""), getattr(item, "__qualname__", "")), item


def _of_the_user(entry: tuple[tuple[str, str], Any]) -> bool:
    """Whether a registered global is one that the user added: torch registers its own internals in the same place."""
    return entry[0][0].partition(".")[0] != "torch"


def _load(unpickler: _MetadataUnpickler | _ObjectUnpickler, source: str) -> Any:
    try:
        return unpickler.load()
    except CheckpointingException as exc:
        if str(exc).startswith(source):
            raise
        raise type(exc)(f"{source}: {exc}") from exc
    except Exception as exc:  # whatever a damaged pickle makes the machine do
        raise CorruptCheckpointError(f"{source}: the pickle is damaged: {type(exc).__name__}: {exc}") from exc


__all__ = ["load_metadata", "load_object"]
