"""Combining values of several checkpoints: sums whose bits depend neither on the order nor on how they are cut."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

#: Elements that are combined at a time: the terms of a sum stay in the processor's cache.
_ELEMENTS = 1 << 15
#: Elements whose products are added up by torch: fewer than it shares among threads, so the sum has always one order.
_ROW = 4096
#: Above this cosine, the sine that slerp divides by is too small: values are interpolated linearly, as by mergekit.
_PARALLEL = 0.9995


class Combination(NamedTuple):
    """A weighted sum.

    Attributes:
        weights: The weight of each source's values.
        divisor: What the sum is divided by.
    """

    weights: tuple[float, ...]
    divisor: float = 1.0


def make_average(weights: Sequence[float]) -> Combination:
    """Return the weighted average."""
    # fsum: the sum of weights must not depend on their order either
    return Combination(tuple(weights), math.fsum(weights))


def combine(values: Sequence[torch.Tensor], how: Combination, target: torch.Tensor, accumulate: torch.dtype) -> None:
    """Fill a tensor with a weighted sum, computed in one dtype and rounded once to the target's.

    The terms of each element are added in ascending order, so the result depends on the values and their weights alone:
    not on the order of the sources, on how tensors are cut, or on the number of threads.

    Args:
        values: The values of each source, of the target's shape; of complex dtypes if the target's is.
        how: The weights.
        target: Is filled.
        accumulate: ``torch.float32`` or ``torch.float64``; for complex values, of each of their two parts.
    """
    if target.is_complex():
        parts = [torch.view_as_real(value.to(target.dtype)) for value in values]
        combine(parts, how, torch.view_as_real(target), accumulate)
        return
    flat = [value.reshape(-1) for value in values]
    found = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype)
    for start in range(0, found.numel(), _ELEMENTS):
        some = slice(start, start + _ELEMENTS)
        total = _add([value[some].to(accumulate) * weight for value, weight in zip(flat, how.weights, strict=True)])
        if how.divisor != 1:
            total /= how.divisor
        # which NaN comes of two depends on their order
        found[some] = total.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
    if not target.is_contiguous():
        target.copy_(found.view(target.shape))


def _add(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, whose elements are sorted first: floating-point addition is not associative."""
    ranks: list[torch.Tensor] = []
    for term in terms:
        rest = term
        for number, lower in enumerate(ranks):
            ranks[number], rest = torch.minimum(lower, rest), torch.maximum(lower, rest)
        ranks.append(rest)
    total = ranks[0]
    for higher in ranks[1:]:
        total += higher
    return total


class Angle:
    """Adds up what the angle between two tensors is computed from, block by block.

    The blocks must be the same each time: then so are the sums.
    """

    def __init__(self) -> None:
        self._sums: tuple[list[float], list[float], list[float]] = ([], [], [])

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Add a block of both."""
        one, other = (_flatten(values) for values in (first, second))
        for sums, product in zip(self._sums, (one * other, one * one, other * other), strict=True):
            whole = product.numel() // _ROW * _ROW
            sums.extend(product[:whole].view(-1, _ROW).sum(1).tolist())
            sums.append(product[whole:].sum().item())

    def interpolate(self, part: float, key: str) -> Combination:
        """Return the spherical interpolation of the two tensors.

        Args:
            part: How far from the first to the second, from 0 to 1.
            key: The tensor's, for the error.

        Raises:
            CheckpointingException: A value is not finite, so there is no angle.
        """
        if not all(map(math.isfinite, (value for sums in self._sums for value in sums))):
            raise CheckpointingException(
                f"{key!r} has values that are not finite, or too large to square, in a source: slerp has no angle to "
                "go along; leave the tensor out (leave_out=..., --leave-out), or merge linearly"
            )
        # fsum rounds once, whatever the order
        dot, *squares = (math.fsum(sums) for sums in self._sums)
        lengths = math.sqrt(squares[0]) * math.sqrt(squares[1])
        cosine = dot / lengths if lengths else 1.0
        if abs(cosine) > _PARALLEL:
            return Combination((1 - part, part))
        angle = math.acos(cosine)
        return Combination(tuple(math.sin(share * angle) / math.sin(angle) for share in (1 - part, part)))


def _flatten(values: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(values) if values.is_complex() else values
    return real.reshape(-1).double()
