"""Statistics of a stored tensor's values, in bounded memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from shardckpt.errors import CheckpointingException
from shardckpt.planning.batches import batch_by_bytes
from shardckpt.tensors.memory import QUANTIZED_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from shardckpt.engine.lazy import StoredCheckpoint, StoredTensor

#: Bytes of a block. Peak memory is about 18 times this for 1-byte dtypes: the block (1), its float64 copy (8), a mask
#: (1) and the finite values (8).
_BLOCK_BYTES = 8 << 20
#: The dtypes of integers that int64 has, and that torch's ``min`` and ``max`` take; others go by float64.
INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


@dataclass(frozen=True)
class Statistics:
    """Statistics of the values in a region; of a complex dtype, of the absolute values, computed in float64.

    Attributes:
        count: The number of elements.
        nans: The number that are NaN.
        infs: The number that are infinite.
        minimum: The least finite value, exact for int8 to int64 and uint8, else a float64; None if no value is finite.
        maximum: The greatest finite value, of the same type.
        mean: The mean of the finite values, computed in float64; None if no value is finite.
        norm: The Euclidean norm of the finite values, computed in float64: infinite if a sum of squares is beyond it.
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
    """Compute statistics of a region of a stored tensor, which is read block by block. Not collective.

    Args:
        stored: The tensor.
        index: The region, as for indexing.
        count_bytes: Called with the size of each block that was read, for progress.

    Raises:
        CheckpointingException: torch does not convert the dtype to float64.
    """
    return _summarize(stored, stored.blocks(index, max_bytes=_BLOCK_BYTES), count_bytes)


def compute_each(
    checkpoint: StoredCheckpoint, tensors: Iterable[StoredTensor], count_bytes: Callable[[int], None]
) -> Iterator[Statistics]:
    """Yield the statistics of each tensor; see :func:`compute_statistics`. Small ones are read together."""
    for batch in batch_by_bytes(tensors, attrgetter("nbytes"), _BLOCK_BYTES):
        if len(batch) == 1:
            yield compute_statistics(batch[0], ..., count_bytes)
        else:
            values = checkpoint.read([each.key for each in batch])  # a plan for all of them
            yield from (_summarize(each, [values[each.key]], count_bytes) for each in batch)


def _summarize(stored: StoredTensor, blocks: Iterable[torch.Tensor], count_bytes: Callable[[int], None]) -> Statistics:
    count = nans = infs = finite_count = 0
    minima: list[float] = []
    maxima: list[float] = []
    sums: list[float] = []
    norms: list[float] = []
    for block in blocks:
        count_bytes(block.nbytes)
        values = _to_float64(stored, block)
        finite = values[values.isfinite()]
        count += values.numel()
        nans += int(values.isnan().sum())
        infs += int(values.isinf().sum())
        finite_count += finite.numel()
        if finite.numel():
            # integers are all finite, so the whole block is comparable; float64 would round those beyond 2**53
            for_extrema = block if block.dtype in INTEGERS else finite
            minima.append(for_extrema.min().item())
            maxima.append(for_extrema.max().item())
            sums.append(finite.sum().item())
            norms.append(finite.norm().item())
    return Statistics(
        count=count,
        nans=nans,
        infs=infs,
        minimum=min(minima, default=None),
        maximum=max(maxima, default=None),
        mean=_sum_exactly(sums) / finite_count if finite_count else None,
        norm=math.hypot(*norms),  # hypot scales: the squares of the blocks' norms do not overflow
    )


def is_numeric(dtype: torch.dtype) -> bool:
    """Return whether torch computes with values of a dtype; it does not for packed dtypes, such as float4."""
    if dtype.is_complex or dtype in QUANTIZED_DTYPES:  # torch warns of some of these
        return dtype.is_complex
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(torch.float64)  # an empty tensor would be converted from any dtype
    except (RuntimeError, TypeError):
        return False
    return True


def _to_float64(stored: StoredTensor, block: torch.Tensor) -> torch.Tensor:
    """Return a block's values, flattened, in float64; of a complex dtype, the absolute values."""
    try:
        # in complex128, because the absolute value of a finite complex64 may be beyond float32
        values = block.to(torch.complex128).abs() if block.dtype.is_complex else block.to(torch.float64)
    except (RuntimeError, TypeError) as exc:  # packed dtypes, such as float4
        raise CheckpointingException(
            f"{stored.key!r} has no statistics: torch does not convert {stored.dtype} to numbers ({exc})"
        ) from exc
    return values.flatten()


def _sum_exactly(sums: Sequence[float]) -> float:
    """Return the exact sum, rounded once. With infinite or NaN numbers, or beyond float64, it is as float64 adds."""
    try:
        return math.fsum(sums)
    except (OverflowError, ValueError):
        pass
    try:
        return float(sum(map(Fraction, sums)))  # fsum gives up where a sum on the way is beyond float64
    except (OverflowError, ValueError):
        return sum(sums)
