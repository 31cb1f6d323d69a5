"""The only reader of pickles from checkpoints: globals come from an allow-list, and there is no fallback.

Two checks guard it. :func:`check_pickle` reads the opcodes and refuses a pickle that would take too
much memory, before any object is built. Faults that only the values show are found while the unpickler builds them.
"""

from __future__ import annotations

import _compat_pickle
import enum
import functools
import io
import pickle
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from shardckpt.archive.globals import GET_MEMBER, METADATA_TABLE, OBJECT_TABLE, STUB_PACKAGES, Table
from shardckpt.archive.numpy_globals import count_copied_bytes, list_objects, numpy_global
from shardckpt.archive.opcodes import check_pickle
from shardckpt.archive.pickle_policy import (
    Collisions,
    Nesting,
    OuterClass,
    PendingValue,
    apply_state,
    check_arguments,
    check_container,
    describe,
    list_hashed_keys,
    list_values,
)
from shardckpt.distributed.error_report import replace_text
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, UnsafePickleError, listed
from shardckpt.stubs.stub import Stub, make_stub_class

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    _Storage = Callable[[Any], Any]

#: Bytes that the calls of a pickle may copy: a fixed number, plus a number per byte of the pickle.
_FREE, _COPIES = 16 << 20, 64
#: Modules whose functions run commands or code, or reach files, and builtins that do: as attacks name them.
_RUN_CODE = {
    "code",
    "ctypes",
    "importlib",
    "nt",
    "os",
    "pickle",
    "posix",
    "pty",
    "runpy",
    "shutil",
    "subprocess",
    "sys",
}
_RUN_CODE_OF_BUILTINS = {"__import__", "breakpoint", "compile", "eval", "exec", "getattr", "open", "setattr"}
#: Rebuilds a tensor of quantize_per_tensor or torch.ao: its storage is pickled in another way than all others.
_QUANTIZED = "torch._utils._rebuild_qtensor"
#: Most classes of stubs in a pickle: each takes two kilobytes, however short its name is.
_MOST_STUB_CLASSES = 1024
#: Refused globals that an error looks for.
_MOST_REFUSED = 100


def make_refusal(asks: str, names: Sequence[str], places: str = "") -> UnsafePickleError:
    """Return the error about globals that are not on the allow-list.

    Its text begins with ``asks``, such as ``"FILE: the pickle asks for"``. ``places`` says where they are, a line for
    each place, instead of the names alone.
    """
    if hostile := [name for name in names if _runs_code(name)]:
        error = UnsafePickleError(
            f"{asks} {listed(hostile)}; nothing was run. That runs commands or code, or reaches files, as an attack "
            "does, and no state of a training needs it: do not load this by other means, and ask whoever wrote it"
        )
        error.refused, error.runs_code, error.can_be_allowed = tuple(names), True, False
        return error
    if _QUANTIZED in names:
        error = UnsafePickleError(
            f"{asks} a quantized tensor of torch, which is not read here, whatever is allowed:"
            f"{places or f' {listed(names)}'}\nSave its int_repr(), scale and zero point, or its dequantize(), instead"
        )
        error.refused, error.can_be_allowed = tuple(names), False
        return error
    *_, last = names
    module, _, own = last.rpartition(".")
    if len(names) == 1 and not places:
        error = UnsafePickleError(
            f"{asks} {last}, which is not on the allow-list; nothing was run. If you trust whoever wrote the "
            f"checkpoint, pass allow_globals=[{own}] with that class or function of {module}, or "
            f'[(it, "{last}")] if it does not go by that name'
        )
    else:
        found = places or f" {listed(names)}"
        error = UnsafePickleError(
            f"{asks} globals that are not on the allow-list; nothing was run:{found}\nIf you trust whoever wrote the "
            f"checkpoint, pass allow_globals=[{listed([name.rpartition('.')[2] for name in names])}] with these "
            f'classes and functions, each as (it, "module.name") if it does not go by that name'
        )
    error.refused = tuple(names)
    return error


def _runs_code(name: str) -> bool:
    """Return whether a global, ``"module.name"``, is one that attacks name."""
    module, _, own = name.rpartition(".")
    return own in _RUN_CODE_OF_BUILTINS if module == "builtins" else module.partition(".")[0] in _RUN_CODE


class _AllowList:
    """Finds globals in a table, then by ``more``; any other global is an error."""

    table: Table
    source: str
    more: Callable[[str, str], Any] | None = None

    def find_class(self, module: str, name: str) -> Any:
        module, name = _python3_name(module, name)
        found = self.table.get((module, name))
        if found is None and self.more is not None:
            found = self.more(module, name)
        if found is None and module == "torch":
            dtype = vars(torch).get(name)  # getattr would import torch's lazy attributes, by the pickle's choice
            found = dtype if isinstance(dtype, torch.dtype) else None
        if found is None:
            raise make_refusal(f"{self.source}: the pickle asks for", [f"{module}.{name}"])
        return found


class _MetadataUnpickler(_AllowList, pickle.Unpickler):
    """The C unpickler, which is fast, for the many records of ``.metadata``: no BUILD changes its table's objects."""

    def __init__(self, data: bytes, source: str) -> None:
        super().__init__(io.BytesIO(data))
        self.table, self.source = METADATA_TABLE, source

    def persistent_load(self, pid: Any) -> Any:
        raise CorruptCheckpointError(
            f"{self.source}: a pickle outside an archive refers to a tensor storage: {describe(pid)}"
        )


class _Memo(dict[int, Any]):
    """A memo that notes the keys of pending values, so that BUILD can replace them."""

    def __setitem__(self, key: int, value: Any) -> None:
        if isinstance(value, PendingValue):
            value.keys.append(key)
        super().__setitem__(key, value)

    def __getitem__(self, key: int) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, PendingValue):
            raise CorruptCheckpointError(f"the pickle uses {value!r}: an array that holds itself is not supported")
        return value


_PythonUnpickler: Any = pickle._Unpickler  # noqa: SLF001 - only this one lets its opcodes be guarded


class _ObjectUnpickler(_AllowList, _PythonUnpickler):  # type: ignore[misc]
    """The Python unpickler with checks of calls, states and sizes, for objects and common state."""

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
        #: The classes that the caller allows, and stubs, with their names in the pickle.
        self._allowed_types: dict[type, tuple[str, str]] = {}
        self._stub_classes: set[type] = set()
        self._pending: set[PendingValue] = set()

    def load(self) -> Any:
        loaded = super().load()
        if self._pending:
            raise CorruptCheckpointError(f"{self.source}: the pickle ends with {self._pending.pop()!r}")
        return loaded

    def persistent_load(self, pid: Any) -> Any:
        return self._storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if isinstance(found, type) and found not in self.table.values():
            self._allowed_types[found] = module, name
            if issubclass(found, Stub):
                self._stub_classes.add(found)
        if len(self._stub_classes) > _MOST_STUB_CLASSES:
            raise CorruptCheckpointError(f"the pickle names more than {_MOST_STUB_CLASSES} classes of other libraries")
        return found

    # pickle's own would look the code up in a cache of this process before it asks find_class.
    def get_extension(self, code: int) -> Any:
        raise CorruptCheckpointError(f"{self.source}: the pickle has extension code {code}, which nothing registers")

    def _spend(self, nbytes: int) -> None:
        """Count the bytes that calls copy: a pickle that copies far more than its own size is a bomb."""
        self._left -= nbytes
        if self._left < 0:
            raise CorruptCheckpointError(f"{self.source}: the pickle of {self._size} bytes copies itself too often")

    def load_reduce(self) -> None:
        args, function = self.stack.pop(), self.stack[-1]
        call = self._get_member if function is GET_MEMBER else function
        made = self.stack[-1] = self._call(function, args, call)
        if isinstance(made, PendingValue):
            self._pending.add(made)

    def _get_member(self, owner: Any, name: Any) -> Any:
        """Return a class inside a class by the name that protocol 4 has for it, or a member of an enum."""
        home = owner.home if isinstance(owner, OuterClass) else None
        if isinstance(owner, type) and not issubclass(owner, (enum.Enum, Stub)):
            home = self._allowed_types.get(owner)
        if home is None or not isinstance(name, str):
            return GET_MEMBER(owner, name)
        return self.find_class(home[0], f"{home[1]}.{name}")

    def _call(self, function: Any, args: Any, call: Callable[..., Any], *first: Any) -> Any:
        """Call a function or class after its arguments are checked; ``call(*first, *args)`` does it."""
        self._spend(check_arguments(function, args))
        if isinstance(function, type):
            self._collisions.add(None, list_hashed_keys(function, args))
        made = call(*first, *args)
        self._nesting.add(made, list_values(made))
        return made

    def load_newobj(self) -> None:
        self.stack.append({})  # NEWOBJ is NEWOBJ_EX without keyword arguments
        self.load_newobj_ex()

    def load_newobj_ex(self) -> None:
        names, args, kind = self.stack.pop(), self.stack.pop(), self.stack.pop()
        if not isinstance(kind, type) or type(names) is not dict:
            raise UnsafePickleError(f"the pickle makes an object of {describe(kind)}, which is not a class: refused")
        self._spend(check_arguments(kind, tuple(names.values())))
        self.stack.append(self._call(kind, args, functools.partial(kind.__new__, **names), kind))

    def _instantiate(self, klass: Any, args: list[Any]) -> None:
        self.stack.append(self._call(klass, tuple(args), klass))

    def load_build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, PendingValue):
            self._spend(count_copied_bytes(state))
            built = self.stack[-1] = target.build(state)
            self._nesting.add(built, list_objects(state))
            # Later opcodes get the value from the memo: it must be the finished one.
            self.memo.update(dict.fromkeys(target.keys, built))
            self._pending.discard(target)
        elif not apply_state(target, state, self._is_allowed):
            self.stack.append(state)
            super().load_build()

    def _is_allowed(self, kind: type) -> bool:
        return kind in self._allowed_types or issubclass(kind, Stub)

    def load_append(self) -> None:
        self._check_put(self.stack[-2], [self.stack[-1]])
        super().load_append()

    def load_appends(self) -> None:
        self._check_put(self.metastack[-1][-1], self.stack)
        super().load_appends()

    def load_setitem(self) -> None:
        self._check_put(self.stack[-3], [self.stack[-1]], [self.stack[-2]])
        super().load_setitem()

    def load_setitems(self) -> None:
        self._check_put(self.metastack[-1][-1], self.stack[1::2], self.stack[::2])
        super().load_setitems()

    def load_additems(self) -> None:
        self._check_put(self.metastack[-1][-1], (), self.stack)
        super().load_additems()

    def load_dict(self) -> None:
        self._collisions.add(None, self.stack[::2])
        super().load_dict()

    def load_frozenset(self) -> None:
        self._collisions.add(None, self.stack)
        super().load_frozenset()

    # Each opcode that adds to a container is overridden: pickle's own methods would add without a check.
    def _check_put(self, target: Any, values: Iterable[Any], keys: Iterable[Any] = ()) -> None:
        """Check the values and keys that a container gets."""
        check_container(target)
        self._collisions.add(target, keys)
        self._nesting.add(target, values)

    def load_bytearray8(self) -> None:
        # pickle's own load_bytearray8 allocates the size that the pickle claims, before it reads the bytes.
        size = int.from_bytes(self.read(8), "little")
        content = self.read(size) if size <= self._size else b""
        if len(content) != size:
            raise CorruptCheckpointError(f"{self.source}: the pickle has no {size} bytes for a bytearray")
        self.stack.append(bytearray(content))

    # pickle finds its opcodes in this table, not by the names of methods.
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


class _Collector(_ObjectUnpickler):
    """Goes on with inert stubs for refused globals, to name all globals of a pickle; its result is dropped.

    ``refused`` has their names, in the order of the pickle.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.refused: dict[str, None] = {}

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except UnsafePickleError as exc:
            self.refused.update(dict.fromkeys(exc.refused))
            if len(self.refused) > _MOST_REFUSED or not exc.refused:
                raise
        return make_stub_class(*_python3_name(module, name))


def load_metadata(data: bytes, source: str) -> Any:
    """Unpickle a ``.metadata`` file, or another index that is a pickle of plain data; types and values are not checked.

    For ``.metadata`` it returns a record with the attributes of DCP's ``Metadata``; records are in place of all its
    classes. A global outside the allow-list is an UnsafePickleError, a pickle that would take too much memory a
    CorruptCheckpointError.
    """
    check_pickle(data, source, plain=True)
    return _load(_MetadataUnpickler(data, source), source)


def load_object(
    data: bytes,
    source: str,
    torch_global: Callable[[str, str], Any],
    storage: _Storage,
    allow_globals: Iterable[Any] = (),
) -> Any:
    """Return the object of the pickle in a ``torch.save`` archive.

    ``torch_global`` returns the function that rebuilds tensors, by (module, name), or None. ``allow_globals`` are
    classes and functions that the caller allows, in addition to those that the user registered by
    ``torch.serialization.add_safe_globals``; each by itself, or as (class or function, "module.name").
    """
    allowed = functools.cache(lambda: _list_allowed(allow_globals))  # on demand: few pickles need it

    def extra(module: str, name: str) -> Any:
        ours = torch_global(module, name) or numpy_global(module, name)
        if ours is not None:  # before the caller's list: with numpy's own functions a pickle can corrupt memory
            return ours
        if f"{module}.{name}" in allowed():
            return allowed()[f"{module}.{name}"]
        if any(each.startswith(f"{module}.{name}.") for each in allowed()):
            return OuterClass(module, name)
        return make_stub_class(module, name) if module.partition(".")[0] in STUB_PACKAGES else None

    def inert(module: str, name: str) -> Any:
        """Return the same, but stubs for globals that the caller allows: they are not called with other stubs."""
        found = extra(module, name)
        return make_stub_class(module, name) if found is not None and f"{module}.{name}" in allowed() else found

    check_pickle(data, source)
    try:
        return _load(_ObjectUnpickler(data, source, extra, storage), source)
    except UnsafePickleError as exc:
        if not exc.refused:
            raise
        collector = _Collector(data, source, inert, storage)
        whole = None
        with suppress(Exception):  # of a stub, or of an archive in this one: there may be more, which come next time
            whole = collector.load()
        names = list(dict.fromkeys([*exc.refused, *collector.refused]))
        error = exc if len(names) == len(exc.refused) else make_refusal(f"{source}: the pickle asks for", names)
        error.is_module = isinstance(whole, Stub) and hasattr(whole, "_modules")
        raise error from None


def _python3_name(module: str, name: str) -> tuple[str, str]:
    """Return a global by its Python 3 name: pickles of protocol 2, as torch writes them, use the names of Python 2."""
    if (module, name) in _compat_pickle.NAME_MAPPING:
        return _compat_pickle.NAME_MAPPING[module, name]
    return _compat_pickle.IMPORT_MAPPING.get(module, module), name


def _list_allowed(allow_globals: Iterable[Any]) -> dict[str, Any]:
    """Return the globals that the user allows, by the "module.name" that pickles write."""
    registered = map(_name_global, torch.serialization.get_safe_globals())
    # torch registers internals of its own in the same list: only the others are the user's.
    users = (entry for entry in registered if entry[0].partition(".")[0] != "torch")
    return dict((*users, *map(_name_global, allow_globals)))


def _name_global(item: Any) -> tuple[str, Any]:
    """Return the "module.name" that a pickle writes for an allowed global, and the global."""
    # as one text: of "package.Outer.Inner" only the pickle says where the module ends
    if isinstance(item, tuple):
        return item[1], item[0]
    return f"{getattr(item, '__module__', '')}.{getattr(item, '__qualname__', '')}", item


def _load(unpickler: _MetadataUnpickler | _ObjectUnpickler, source: str) -> Any:
    try:
        return unpickler.load()
    except CheckpointingException as exc:
        if str(exc).startswith(source):
            raise
        raise replace_text(exc, f"{source}: {exc}") from exc.__cause__
    except Exception as exc:  # a damaged pickle can raise any error
        raise CorruptCheckpointError(f"{source}: the pickle is damaged: {type(exc).__name__}: {exc}") from exc
