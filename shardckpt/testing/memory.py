"""Layouts of a tensor's elements in memory: strides, offsets, lazy conjugation and negation."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

GARBAGE = 0x5A
#: dtypes whose NaNs keep their bits when they are negated or conjugated twice.
NEGATED = (torch.float64, torch.float32)
PACKED = tuple(getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name))
CONJUGATED = (torch.complex128, torch.complex64)


class TensorInMemory(NamedTuple):
    """A view, and all the memory around it."""

    view: torch.Tensor
    base: torch.Tensor


def garbage(count: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one axis whose bytes are all equal; for bool, of True."""
    raw = torch.full((count * dtype.itemsize,), 1 if dtype == torch.bool else GARBAGE, dtype=torch.uint8)
    return raw.view(dtype)


def _contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInMemory:
    base = garbage(torch.Size(shape).numel(), dtype)
    return TensorInMemory(base.view(shape), base)


def _offset(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInMemory:
    base = garbage(torch.Size(shape).numel() + 7, dtype)
    return TensorInMemory(base[3:-4].view(shape), base)


def _transposed(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInMemory:
    axes = tuple(reversed(range(len(shape))))
    inner = _contiguous(shape[::-1], dtype)
    return TensorInMemory(inner.view.permute(axes), inner.base)


def _rotated(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInMemory:
    inner = _contiguous((*shape[1:], *shape[:1]), dtype)
    return TensorInMemory(inner.view.movedim(-1, 0) if shape else inner.view, inner.base)


def _every_second(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInMemory:
    inner = _contiguous(tuple(2 * size for size in shape), dtype)
    return TensorInMemory(inner.view[(slice(None, None, 2),) * len(shape)], inner.base)


def _window(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInMemory:
    inner = _contiguous(tuple(size + 3 for size in shape), dtype)
    return TensorInMemory(inner.view[(slice(1, -2),) * len(shape)], inner.base)


def _negated(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInMemory:
    """A view with the lazy bit that its dtype can have: conjugation, negation or none."""
    plain = _contiguous(shape, dtype)
    if dtype in CONJUGATED:
        return TensorInMemory(plain.view.conj(), plain.base)
    if dtype not in NEGATED:
        return plain
    return TensorInMemory(torch._neg_view(plain.view), plain.base)  # noqa: SLF001 - else only the imaginary parts of views have it


MEMORY_LAYOUTS: dict[str, Callable[[tuple[int, ...], torch.dtype], TensorInMemory]] = {
    "contiguous": _contiguous,
    "offset": _offset,
    "transposed": _transposed,
    "rotated": _rotated,
    "every second": _every_second,
    "window": _window,
    "negated": _negated,
}


def place_in_memory(values: torch.Tensor, way: str) -> TensorInMemory:
    """A copy of values that lies in memory in one of the ``MEMORY_LAYOUTS``."""
    laid = MEMORY_LAYOUTS[way](tuple(values.shape), values.dtype)
    plain(laid.view).copy_(plain(values))
    return laid


def squeezed(values: torch.Tensor, axis: int) -> torch.Tensor:
    """Values that are equal along an axis as an expanded view of memory that has them once."""
    once = values.narrow(axis, 0, min(1, values.shape[axis]))
    return plain(once).clone().view(values.dtype).expand(values.shape)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes, for dtypes that torch does not copy or fill; any other tensor as it is."""
    return tensor.view(torch.uint8) if tensor.dtype in PACKED else tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, element by element."""
    values = plain(tensor.resolve_conj().resolve_neg())
    return values.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
