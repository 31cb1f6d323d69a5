"""Whether two values are the same to the bit."""

from __future__ import annotations

import io
import struct
from collections import OrderedDict, deque
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy


def is_same(one: Any, other: Any) -> bool:
    """Whether two values have one type, and equal dtypes and bits in all of their parts."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    return repr(one) == repr(other)


def list_bits(value: Any) -> Any:
    """Return a value by type, dtype, shape and bits, in a form that can be compared; a dict's order is not compared."""
    found = value
    if isinstance(value, DTensor):
        found = list_bits(value.full_tensor())
    elif is_lazy(value):
        found = repr(value)
    elif hasattr(value, "__tensor_flatten__"):
        found = [(name, list_bits(getattr(value, name))) for name in value.__tensor_flatten__()[0]]
    elif isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1).resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        found = (value.dtype, tuple(value.shape), flat.view(torch.uint8).tolist() if flat.numel() else [])
    elif isinstance(value, dict):
        items = [(type(key).__name__, str(key), list_bits(each)) for key, each in value.items()]
        found = items if isinstance(value, OrderedDict) else sorted(items, key=itemgetter(0, 1))
    elif isinstance(value, (list, tuple, deque)):
        found = (getattr(value, "maxlen", None), list(map(list_bits, value)))
    elif isinstance(value, (float, complex)):
        found = struct.pack("dd", complex(value).real, complex(value).imag)
    elif isinstance(value, (np.ndarray, np.generic)):
        found = (str(value.dtype), value.shape, value.tolist())
    elif isinstance(value, io.BytesIO):
        found = value.getvalue()
    return (type(value).__name__, found)
