"""The allow-lists: every global that a pickle in a checkpoint may name, and the object that stands for it.

A pickle never reaches a real function: each is replaced by a checked function of ours. Classes of other libraries are
replaced by inert stubs (shardckpt/stubs). pickle_policy.py says what a pickle may do with these objects.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import io
import pathlib
import types
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.archive.pickle_policy import FunctionProxy, OpaqueClass, describe
from shardckpt.errors import UnsafePickleError
from shardckpt.stubs.stub import Frozen, Stub

if TYPE_CHECKING:
    from typing_extensions import Self

#: (module, name) of a global, and the object that the unpickler returns for it.
Table = dict[tuple[str, str], Any]


class _Record(metaclass=Frozen):
    """An inert record of attributes, in place of DCP's metadata classes."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)


class _Properties(_Record):
    """DCP's TensorProperties, of which the dtype is kept.

    Its state is a tuple that begins with the dtype; in old files, a dict.
    """

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]


def _encode_latin1(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):  # punycode and idna take quadratic time
        raise UnsafePickleError(f"a text as {describe(encoding)}: only latin1, as pickle itself writes bytes")
    return text.encode("latin1")


def _make_empty_bytes() -> bytes:
    """Return ``b""``, as protocols 0 to 2 write it. It takes no size: ``bytes(1 << 40)`` would fill the memory."""
    return b""


def _make_bytearray(content: bytes | str = b"", encoding: str = "latin1") -> bytearray:
    return bytearray(_encode_latin1(content, encoding) if isinstance(content, str) else memoryview(content))


def _make_ordered_dict() -> collections.OrderedDict[Any, Any]:
    """Return an empty dict: ``.metadata`` adds the items one by one. Copies are refused, they multiply the memory."""
    return collections.OrderedDict()


def _layout_name(name: Any) -> str:
    """Return the name of a layout, which DCP pickles and this library does not use."""
    return name if isinstance(name, str) else "unknown"


def _get_member(owner: Any, name: str) -> Any:
    """Return a member of an enum, the only attribute that a pickle gets by ``getattr``.

    The unpickler itself looks up classes inside of classes that the caller allows.
    """
    if isinstance(owner, type) and issubclass(owner, Stub):
        return owner.for_member(name)
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:  # of an enum that the caller allows
        return owner.__members__[name]
    raise UnsafePickleError(f"a pickle asks for attribute {describe(name)} of {describe(owner)}: refused")


#: The object in the place of ``getattr``.
GET_MEMBER = FunctionProxy(_get_member)


def _make_instance(kind: Any, _base: Any, _state: Any) -> Any:
    """Return a new object without a call of its class: ``copyreg._reconstructor``, of protocols 0 and 1."""
    if isinstance(kind, type) and (issubclass(kind, Stub) or kind.__new__ is object.__new__):
        return Stub.__new__(kind) if issubclass(kind, Stub) else object.__new__(kind)
    raise UnsafePickleError(f"a pickle asks for an object of {describe(kind)} without its constructor: refused")


_BUILTINS = (bool, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)
_TIMES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)

#: The class of an unpickled path, by its name in the pickle. A path of the other system becomes a pure one. To make a
#: path touches no file.
_PATHS = {
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
    "PosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,
    "Path": pathlib.Path,
    type(pathlib.Path()).__name__: pathlib.Path,
}

#: The globals that common state and objects may name, besides dtypes, tensors, Megatron's classes and numpy arrays.
OBJECT_TABLE: Table = {
    **{("builtins", kind.__name__): kind for kind in _BUILTINS},
    ("builtins", "bytes"): FunctionProxy(_make_empty_bytes),
    ("builtins", "bytearray"): FunctionProxy(_make_bytearray, copies=True),
    **{("datetime", kind.__name__): kind for kind in _TIMES},
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    ("builtins", "object"): OpaqueClass("object"),
    ("copyreg", "_reconstructor"): FunctionProxy(_make_instance),
    ("builtins", "getattr"): GET_MEMBER,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("collections", "Counter"): collections.Counter,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("_codecs", "encode"): FunctionProxy(_encode_latin1, copies=True),
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    **{
        (module, name): FunctionProxy(kind, copies=True)
        for module in ("pathlib", "pathlib._local")
        for name, kind in _PATHS.items()
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

#: The globals that ``.metadata`` may name, besides dtypes.
METADATA_TABLE: Table = {
    **{
        (module, name): Frozen(name, (_Record,), {})
        for module, names in _METADATA_CLASSES.items()
        for name in names.split()
    },
    (_DCP + "metadata", "TensorProperties"): _Properties,
    ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"): _Properties,
    ("torch.serialization", "_get_layout"): FunctionProxy(_layout_name),
    ("collections", "OrderedDict"): FunctionProxy(_make_ordered_dict),
    ("torch", "Size"): torch.Size,
    **{key: value for key, value in OBJECT_TABLE.items() if key[0].startswith("pathlib")},
}

#: Packages whose classes are read as inert stubs.
STUB_PACKAGES = ("megatron", "deepspeed")
