"""Comparison of values bit for bit, by exact type."""

from __future__ import annotations

import argparse
import collections
import struct
import types
from typing import Any

import numpy as np
import torch

from shardckpt.tensors import movable, plain_cpu, tensor_bytes

_PAIRS = (dict, collections.OrderedDict, collections.Counter, collections.defaultdict)


def show_bits(value: Any) -> Any:  # noqa: PLR0911 - one for each kind of value
    """A value as nested tuples of types and bits: equal for values that are equal bit for bit, types included."""
    cls = type(value)
    if cls in (list, tuple, torch.Size, collections.deque):
        return cls, getattr(value, "maxlen", None), tuple(map(show_bits, value))
    if cls in (set, frozenset):
        return cls, frozenset(map(show_bits, value))
    if cls in _PAIRS:
        factory = getattr(value, "default_factory", None)
        attributes = tuple(map(show_bits, getattr(value, "__dict__", {}).items()))
        return cls, factory, attributes, tuple((show_bits(key), show_bits(item)) for key, item in value.items())
    if cls in (argparse.Namespace, types.SimpleNamespace):
        return cls, tuple(map(show_bits, vars(value).items()))
    if cls is float:
        return cls, struct.pack("<d", value)
    if cls is complex:
        return cls, struct.pack("<dd", value.real, value.imag)
    if isinstance(value, torch.Tensor):
        data = bytes(tensor_bytes(movable(plain_cpu(value))))
        return cls, value.dtype, tuple(value.shape), value.requires_grad, data
    if isinstance(value, (np.ndarray, np.generic)):
        return cls, value.dtype.str, value.shape, value.tobytes()
    return cls, bytes(value) if cls is bytearray else value
