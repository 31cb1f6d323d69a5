"""Statistics of a stored tensor's values, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardckpt.engine.lazy import StoredTensor

#: Bytes of a block; its values take up to eight times that as float64.
_BLOCK_BYTES = 8 << 20


@dataclass(frozen=True)
class Statistics:
    """The statistics of a region's values. Those of a complex dtype are their absolute values.

    Attributes:
        count: How many elements it has.
        nans: How many are NaN.
        infs: How many are infinite.
        minimum: The least finite one; None if there is none.
        maximum: The greatest finite one; None if there is none.
        mean: The mean of the finite ones, computed in float64; None if there is none.
        norm: The Euclidean norm of the finite ones, computed in float64.
    """

    count: int
    nans: int
    infs: int
    minimum: float | None
    maximum: float | None
    mean: float | None
    norm: float


def compute_statistics(
    stored: StoredTensor, index: Any = ..., count_bytes: Callable[[int], None] = lambda _: None
) -> Statistics:
    """Read a region of a stored tensor block by block, and compute statistics of its values. Not collective.

    The region is given as for indexing. ``count_bytes`` is called with the bytes of each block that was read. A dtype
    that torch does not convert to float64 is an error.
    """
    count = nans = infs = finite_count = 0
    least: list[float] = []
    most: list[float] = []
    sums: list[float] = []
    norms: list[float] = []
    for block in stored.blocks(index, max_bytes=_BLOCK_BYTES):
        count_bytes(block.nbytes)
        values = _convert(stored, block)
        finite = values[values.isfinite()]
        count += values.numel()
        nans += int(values.isnan().sum())
        infs += int(values.isinf().sum())
        finite_count += finite.numel()
        if finite.numel():
            exact = block if _is_integer(block.dtype) else finite  # float64 has no integers above 2**53
            least.append(exact.min().item())
            most.append(exact.max().item())
            sums.append(finite.sum().item())
            norms.append(finite.norm().item())
    mean = math.fsum(sums) / finite_count if finite_count else None
    return Statistics(count, nans, infs, min(least, default=None), max(most, default=None), mean, math.hypot(*norms))


def has_numbers(values: torch.Tensor) -> bool:
    """Return whether torch converts the dtype to wider ones: it does not convert packed ones."""
    try:
        values[:0].double() if values.dim() else values.double()
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _convert(stored: StoredTensor, block: torch.Tensor) -> torch.Tensor:
    try:
        values = block.abs() if block.dtype.is_complex else block
        return values.to(torch.float64).flatten()
    except (RuntimeError, TypeError) as exc:  # packed dtypes, such as float4
        raise CheckpointingException(
            f"{stored.key!r} has no statistics: torch does not convert {stored.dtype} to numbers ({exc})"
        ) from exc


def _is_integer(dtype: torch.dtype) -> bool:
    return dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
