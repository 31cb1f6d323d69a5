"""Codecs that users register for classes of their own, by name and by class."""

from __future__ import annotations

import argparse
import collections
import re
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from shardckpt.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Callable

#: Names have a dot, so that they never collide with a name of the format's own.
_NAME = re.compile(r"(?=.{1,255}\Z)[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
#: Classes that the format stores itself: a codec of one would never be asked.
FORMAT_CLASSES = frozenset(
    (
        *(type(None), bool, int, float, complex, str, bytes, bytearray, range),
        *(list, tuple, dict, set, frozenset),
        *(collections.OrderedDict, collections.Counter, collections.defaultdict, collections.deque),
        *(argparse.Namespace, types.SimpleNamespace),
        *(torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device),
    )
)


class Codec(NamedTuple):
    """A registered codec: its name, its class, and the functions to and from plain values."""

    name: str
    cls: type
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


_BY_NAME: dict[str, Codec] = {}
_BY_CLASS: dict[type, Codec] = {}


def register_codec(
    name: str, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any], *, override: bool = False
) -> None:
    """Register how instances of a class are stored in objects and common state of (safetensors, 1).

    Each process that saves or loads such values registers the codec, best in the module that has the class.

    Example:
        ::

            register_codec("acme.Schedule", Schedule, vars, lambda fields: Schedule(**fields))
            register_codec("acme.Phase", Phase, lambda member: member.name, lambda name: Phase[name])  # an enum

    Args:
        name: Stored with each value: letters, digits, ``_`` and ``-``, with at least one dot. Begin it with a name
            that is yours, and never change it: stored values need it. ``shardckpt.`` begins the format's own.
        cls: The class. Instances of its subclasses need codecs of their own.
        encode: Called with an instance; returns its representation: plain values, tensors, arrays, containers of them,
            and instances of other registered classes.
        decode: Called with a copy of the result of ``encode``; returns the instance. A checkpoint may come from a
            stranger: do nothing with the value but check it and build the instance.
        override: Whether to replace codecs of the same name or class.

    Raises:
        PluginError: The name is malformed or the format's, the format stores the class itself, or the name or the class
            has a codec.
    """
    if not _NAME.fullmatch(name):
        raise PluginError(
            f"codec name {name!r}: expected letters, digits, '_' and '-' with a dot between, at most 255 characters, "
            "such as 'acme.Schedule'"
        )
    if name.startswith("shardckpt."):
        raise PluginError(f"codec name {name!r}: names that begin with 'shardckpt.' are the format's; use one of yours")
    if cls in FORMAT_CLASSES:
        raise PluginError(f"codec {name!r}: the format stores {class_name(cls)} itself; register a class of your own")
    codec = Codec(name, cls, encode, decode)
    existing = [other for other in (_BY_NAME.get(name), _BY_CLASS.get(cls)) if other is not None]
    if existing and not override:
        first = existing[0]
        raise PluginError(
            f"codec {name!r} of {class_name(cls)}: {class_name(first.cls)} has the codec {first.name!r} already; "
            "pass override=True to replace it"
        )
    for other in existing:
        _BY_NAME.pop(other.name, None)
        _BY_CLASS.pop(other.cls, None)
    _BY_NAME[name] = codec
    _BY_CLASS[cls] = codec


def find_codec_by_class(cls: type) -> Codec | None:
    """Return the codec of exactly this class, not of a base class, if one is registered."""
    return _BY_CLASS.get(cls)


def find_codec_by_name(name: str) -> Codec | None:
    """Return the codec of this name, if one is registered."""
    return _BY_NAME.get(name)


def class_name(cls: type) -> str:
    """Return the full name of a class, for errors."""
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
