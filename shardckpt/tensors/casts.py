"""Casts to floats that change values: integers that are rounded, and values out of the range of the new float."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from shardckpt.tensors.wrappers import is_quantized

#: Bytes of the floats of 8 bits. Some have no infinity: too large values become their largest number, or nan.
_SMALL = 1
#: Values that are checked at a time: torch makes a copy in float32 to sum values of a smaller dtype.
_PIECE = 256 << 10


def can_change_values(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a cast to a float or complex dtype can do more to some value than round a float."""
    if stored in (torch.bool, wanted) or not (wanted.is_floating_point or wanted.is_complex):
        return False
    try:
        if stored.is_floating_point or stored.is_complex:
            source, real = stored.to_real(), wanted.to_real()
            is_larger = torch.finfo(source).max > torch.finfo(real).max
            return is_larger or any(_has(source, value) > _has(real, value) for value in (-math.inf, -1.0))
        return torch.iinfo(stored).max > _count_exact(wanted)
    except (TypeError, RuntimeError):  # packed dtypes, which torch does not cast
        return False


def may_be_changed(cast: torch.Tensor, stored: torch.dtype) -> bool:
    """Return whether values may have been changed when they were cast from a dtype; no quantized tensor's are.

    It looks at the results, a piece at a time; where it is True, the sources tell.
    """
    if not cast.numel() or is_quantized(cast) or not can_change_values(stored, cast.dtype):
        return False
    cast = cast.detach()
    values = torch.view_as_real(cast.resolve_conj()) if cast.is_complex() else cast
    values = values.view(-1) if values.is_contiguous() else values  # pieces with strides are slower
    longest = max(range(values.ndim), key=values.shape.__getitem__)
    step = max(1, _PIECE * values.shape[longest] // values.numel())
    return any(_is_suspect(piece, stored) for piece in torch.split(values, step, longest))


def _is_suspect(values: torch.Tensor, stored: torch.dtype) -> bool:
    """Return whether one of some values, real ones, may have been changed by the cast."""
    dtype = values.dtype
    if not _has(dtype, -1.0):
        return True  # signs may be lost, and the result has no trace of them
    if values.itemsize == _SMALL:
        values = values.to(torch.float32)
    elif stored.is_floating_point or stored.is_complex:
        # faster than to look for the largest, and it is not finite where a value is not
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        return not math.isfinite(values.sum(dtype=wide).item())
    limit = torch.finfo(dtype).max
    if not (stored.is_floating_point or stored.is_complex):
        limit = min(limit, _count_exact(dtype))
    low, high = (each.item() for each in torch.aminmax(values))
    return not (-limit < low and high < limit)  # also where a value is nan, which compares with nothing


def find_changed_value(source: torch.Tensor, wanted: torch.dtype) -> tuple[Any, Any] | None:
    """Return the first value that a cast changes by more than rounding a float, and the new value; else None."""
    if not source.numel() or not can_change_values(source.dtype, wanted):
        return None
    values = torch.view_as_real(source.resolve_conj()) if source.is_complex() else source
    real = wanted.to_real()
    if values.dtype.is_floating_point:
        values = values.float() if values.itemsize == _SMALL else values  # torch compares no floats of 8 bits
        kept = torch.finfo(real)
        # half a step beyond the largest number the next one begins
        limit = kept.max + kept.eps / 2 * 2.0 ** math.floor(math.log2(kept.max))
        changed = values.abs() >= limit
        if _has(real, -math.inf):
            changed &= values.isfinite()
        elif not _has(real, -1.0):
            changed |= values < 0
    else:
        is_long = values.dtype == torch.uint64
        number = values.view(torch.int64) if is_long else values.to(torch.int64)
        upper = (number >> 32) & 0xFFFFFFFF if is_long else number >> 32
        # in halves, since no float holds all integers; the difference is exact
        changed = (values.to(real).double() - upper.double() * 2.0**32) != (number & 0xFFFFFFFF).double()
    if not changed.any():
        return None
    first = values.reshape(-1)[changed.reshape(-1).to(torch.uint8).argmax()]
    return first.item(), first.to(real).item()


def _count_exact(dtype: torch.dtype) -> float:
    """Return up to which number a float dtype has all integers."""
    return 2 / torch.finfo(dtype.to_real()).eps


@cache
def _has(dtype: torch.dtype, value: float) -> bool:
    """Return whether a float dtype has a value: not all have infinities, or a sign."""
    return torch.tensor(value, device="cpu").to(dtype).float().item() == value
