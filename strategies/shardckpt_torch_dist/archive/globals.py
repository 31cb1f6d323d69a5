"""The allow-lists: every global that a legacy pickle in a checkpoint may name, and what it gets for it.

Nothing here runs what a pickle chooses: functions are replaced by our own, classes of other libraries by inert
stand-ins. What may be done with them is in pickle_policy.py.
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

from shardckpt.errors import UnsafePickleError
from shardckpt_torch_dist.archive.pickle_policy import Marker, brief, shielded
from shardckpt_torch_dist.archive.stubs import Frozen, StandIn

if TYPE_CHECKING:
    from typing_extensions import Self

#: (module, name) → what a pickle gets for that global.
Table = dict[tuple[str, str], Any]


class _Plain(metaclass=Frozen):
    """A record of attributes: the stand-in for DCP's metadata classes."""

    def __new__(cls, *_: Any) -> Self:
        return super().__new__(cls)


class _Properties(_Plain):
    """DCP's TensorProperties, whose state is a tuple that begins with the dtype (a dict in old files)."""

    dtype: torch.dtype

    def __setstate__(self, state: Any) -> None:
        self.dtype = state["dtype"] if isinstance(state, dict) else state[0]


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise UnsafePickleError(f"_codecs.encode with {brief(encoding)}: only latin1, as pickle itself writes bytes")
    return text.encode("latin1")


def _no_bytes() -> bytes:
    """``bytes()``, as old protocols write b"": with a size it would take memory."""
    return b""


def _bytearray(content: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    return bytearray(content.encode(encoding) if isinstance(content, str) else memoryview(content))


def _path(*parts: str) -> pathlib.PurePosixPath:
    return pathlib.PurePosixPath(*parts)


def _ordered_dict() -> collections.OrderedDict[Any, Any]:
    """An empty one: ``.metadata`` fills them item by item, and a copy of another would take memory."""
    return collections.OrderedDict()


def _layout(name: Any) -> str:
    return name if isinstance(name, str) else "unknown"


def _getattr(owner: Any, name: str) -> Any:
    if isinstance(owner, type) and issubclass(owner, StandIn):
        return owner(name)
    if isinstance(owner, enum.EnumMeta) and name in owner.__members__:  # one that the caller allows
        return owner.__members__[name]
    raise UnsafePickleError(f"a pickle asks for attribute {brief(name)} of {brief(owner)}: refused")


def _reconstructor(kind: Any, _base: Any, _state: Any) -> Any:
    """``object.__new__`` of a class, as copyreg writes it."""
    if isinstance(kind, type) and (issubclass(kind, StandIn) or kind.__new__ is object.__new__):
        return StandIn.__new__(kind) if issubclass(kind, StandIn) else object.__new__(kind)
    raise UnsafePickleError(f"a pickle asks for an object of {brief(kind)} without its constructor: refused")


_BUILTINS = (bool, complex, dict, float, frozenset, int, list, range, set, slice, str, tuple)
_TIMES = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone)

_PLAIN: Table = {
    **{("builtins", kind.__name__): kind for kind in _BUILTINS},
    ("builtins", "bytes"): shielded(_no_bytes),
    ("builtins", "bytearray"): shielded(_bytearray, copies=True),
    **{("datetime", kind.__name__): kind for kind in _TIMES},
    ("builtins", "Ellipsis"): ...,
    ("builtins", "NotImplemented"): NotImplemented,
    ("builtins", "object"): Marker("object"),
    ("copyreg", "_reconstructor"): shielded(_reconstructor),
    ("builtins", "getattr"): shielded(_getattr),
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("collections", "defaultdict"): collections.defaultdict,
    ("collections", "deque"): collections.deque,
    ("collections", "Counter"): collections.Counter,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("_codecs", "encode"): shielded(_latin1, copies=True),
    ("_io", "BytesIO"): io.BytesIO,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    **{
        (module, name): shielded(_path, copies=True)
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
    ("torch.serialization", "_get_layout"): shielded(_layout),
    ("collections", "OrderedDict"): shielded(_ordered_dict),
    ("torch", "Size"): torch.Size,
    **{key: value for key, value in _PLAIN.items() if key[0].startswith("pathlib")},
}

#: What common state and objects may name, besides dtypes, tensors, Megatron's classes and numpy arrays.
OBJECT_TABLE: Table = _PLAIN

#: Packages whose classes become stand-ins.
STAND_IN_PACKAGES = ("megatron",)

__all__ = ["METADATA_TABLE", "OBJECT_TABLE", "STAND_IN_PACKAGES", "Table"]
