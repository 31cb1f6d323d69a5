"""The allow-lists: every global that a legacy pickle in a checkpoint may name, and what it gets for it.

Nothing here runs what a pickle chooses: functions are replaced by our own, classes of other libraries by inert
stand-ins, and classes cannot be changed by a pickle (their attributes are frozen).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import importlib
import io
import pathlib
import types
from typing import TYPE_CHECKING, Any, cast

import torch

from shardckpt.errors import UnsafePickleError

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

#: (module, name) → what a pickle gets for that global.
Table = dict[tuple[str, str], Any]


class Frozen(type):
    """A metaclass whose classes refuse new attributes: a pickle's BUILD on the class itself does nothing."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsafePickleError(f"a pickle tries to change the class {cls.__name__}: refused")


class StandIn(metaclass=Frozen):
    """An inert object in place of one whose class is not ours to run: keeps what the pickle says of it.

    Attributes:
        origin: Module and name of the class.
        args: What it would have been called with.
        state: Its pickled attributes; they can be read as attributes of the stand-in.
    """

    origin = ""

    def __new__(cls, *args: Any, **_: Any) -> Self:
        """An instance, whatever the pickle would have called the class with."""
        self = super().__new__(cls)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "state", {})
        return self

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "state", state)

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(f"the stand-in for {self.origin} has no {name!r}")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.setdefault("items", {})[key] = value

    def append(self, value: Any) -> None:
        """Take a value of a list subclass."""
        self.__dict__.setdefault("values", []).append(value)

    def extend(self, values: Any) -> None:
        """Take values of a list subclass."""
        self.__dict__.setdefault("values", []).extend(values)

    def __repr__(self) -> str:
        return f"<stand-in for {self.origin}{self.args!r}>"


class Namespace(argparse.Namespace, metaclass=Frozen):
    """argparse's, with a class that a pickle cannot change."""


class _Plain(metaclass=Frozen):
    """A record of attributes: the stand-in for DCP's metadata classes."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)


class _Properties(_Plain):
    """DCP's TensorProperties, whose state is a tuple that begins with the dtype (a dict in old files)."""

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]


@functools.cache
def stand_in(module: str, name: str) -> type[StandIn]:
    """The stand-in class for a class of another library."""
    return cast("type[StandIn]", Frozen(name.rpartition(".")[2], (StandIn,), {"origin": f"{module}.{name}"}))


def shielded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as something whose own attributes (defaults, code) a pickle cannot reach."""
    return _Shield(function)


class _Shield:
    __slots__ = ("_function",)
    _function: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        raise UnsafePickleError(f"a pickle tries to set {name!r} of a function: refused")


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise UnsafePickleError(f"_codecs.encode with {encoding!r}: only latin1, as pickle itself writes bytes")
    return text.encode("latin1")


def _bytearray(content: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(content.encode(encoding) if isinstance(content, str) else memoryview(content))


def _path(*parts: str) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(*parts)


def _getattr(owner: Any, name: str) -> Any:
    if isinstance(owner, type) and issubclass(owner, StandIn):
        return owner(name)
    raise UnsafePickleError(f"a pickle asks for attribute {name!r} of {owner!r}: refused")


_BUILTINS = (bool, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)

_PLAIN: Table = {
    **{("builtins", kind.__name__): kind for kind in _BUILTINS},
    ("builtins", "bytearray"): shielded(_bytearray),
    **{("datetime", kind.__name__): kind for kind in (datetime.datetime, datetime.date, datetime.timedelta)},
    ("builtins", "getattr"): shielded(_getattr),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("collections", "Counter"): Frozen("Counter", (collections.Counter,), {}),
    ("argparse", "Namespace"): Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("_codecs", "encode"): shielded(_latin1),
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    **{
        (module, name): shielded(_path)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path")
    },
}

_DCP = "torch.distributed.checkpoint."
_METADATA_CLASSES = {
    _DCP + "metadata": (
        "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata MetadataIndex StorageMeta "
        "_MEM_FORMAT_ENCODING"
    ),
    _DCP + "filesystem": "_StorageInfo _StoragePrefix",
    _DCP + "planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
    "torch.distributed._shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING",
    "megatron.core.dist_checkpointing.strategies.torch": "MCoreMetadata MCoreSavePlan",
}

#: What ``.metadata`` may name, besides dtypes.
METADATA_TABLE: Table = {
    **{
        (module, name): Frozen(name, (_Plain,), {})
        for module, names in _METADATA_CLASSES.items()
        for name in names.split()
    },
    (_DCP + "metadata", "TensorProperties"): _Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    ("torch.serialization", "_get_layout"): shielded(str),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    **{key: value for key, value in _PLAIN.items() if key[0].startswith("pathlib")},
}

#: What common state and objects may name, besides dtypes, tensors, Megatron's classes and numpy arrays.
OBJECT_TABLE: Table = _PLAIN

#: Packages whose classes become stand-ins.
STAND_IN_PACKAGES = ("megatron",)

_NUMPY = {
    "_reconstruct": ("numpy.core.multiarray", "numpy._core.multiarray"),
    "scalar": ("numpy.core.multiarray", "numpy._core.multiarray"),
    "_frombuffer": ("numpy.core.numeric", "numpy._core.numeric"),
    "ndarray": ("numpy",),
    "dtype": ("numpy",),
}


def numpy_global(module: str, name: str) -> Any:
    """A numpy global that arrays are pickled with, or None; numpy is imported only if a pickle names it."""
    is_dtype_class = module == "numpy.dtypes" and name.endswith("DType")
    if not is_dtype_class and module not in _NUMPY.get(name, ()):
        return None
    numpy = importlib.import_module("numpy")
    if is_dtype_class or module == "numpy":
        return getattr(numpy.dtypes if is_dtype_class else numpy, name, None)
    home = module.replace("numpy.core", "numpy._core") if hasattr(numpy, "_core") else module
    return shielded(getattr(importlib.import_module(home), name))


__all__ = [
    "METADATA_TABLE",
    "OBJECT_TABLE",
    "STAND_IN_PACKAGES",
    "Frozen",
    "StandIn",
    "Table",
    "numpy_global",
    "shielded",
    "stand_in",
]
