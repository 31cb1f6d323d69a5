"""Whether two values are the same to the bit."""

from __future__ import annotations

from typing import Any

import torch


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
