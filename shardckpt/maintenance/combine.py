"""Combining values of several checkpoints: sums whose bits depend neither on the order nor on how they are cut."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from shardckpt import settings
from shardckpt.errors import CheckpointingException
from shardckpt.storage.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Bytes of terms that are combined at a time: they stay in the processor's cache.
_CACHED = 512 << 10
#: Elements that are combined at a time: with fewer, calls of torch take most of the time; more it shares among threads.
_LEAST, _MOST = 2048, 1 << 15
#: The lesser and the greater of two tensors, element by element.
_BOUNDS = torch.minimum, torch.maximum
#: Elements that a thread combines before it takes the next.
_SHARE = 1 << 16
#: Elements whose products are added up by torch: fewer than it shares among threads, so the sum has always one order.
_ROW = 4096
#: Weights up to this power of two, or its reciprocal, are used as they are.
_NEAR = 64
#: Above this cosine, the sine that slerp divides by is too small: values are interpolated linearly, as by mergekit.
_PARALLEL = 0.9995


class Combination(NamedTuple):
    """A weighted sum: a weight for each source's values, and the divisor of the sum."""

    weights: tuple[float, ...]
    divisor: float = 1.0

    @property
    def is_average(self) -> bool:
        """Whether every result is between the smallest and the largest of its values."""
        return min(self.weights) >= 0 and math.fsum(self.weights) == self.divisor

    @property
    def exponent(self) -> int:
        """The power of two above all weights."""
        return math.frexp(max(map(abs, self.weights)))[1]

    def shrink(self, exponent: int) -> Combination:
        """Return the same combination with weights and divisor divided by a power of two.

        All sums have the same bits, unless they are very small.
        """
        return Combination(
            tuple(math.ldexp(weight, -exponent) for weight in self.weights), math.ldexp(self.divisor, -exponent)
        )


def make_average(weights: Sequence[float]) -> Combination:
    """Return the weighted average; only the ratios of the weights count."""
    # fsum: the sum of weights must not depend on their order either
    found = Combination(tuple(weights), math.fsum(weights))
    # far from 1, float32 has no place for the divisor, or few bits for the terms
    return found.shrink(found.exponent) if abs(found.exponent) > _NEAR else found


def combine(values: Sequence[torch.Tensor], how: Combination, target: torch.Tensor, accumulate: torch.dtype) -> None:
    """Fill a tensor with a weighted sum, computed in one dtype and rounded once to the target's.

    The terms of each element are added in ascending order, so the result depends on the values and their weights alone:
    not on the order of the sources, on how tensors are cut, or on the number of threads. The values of each source have
    the target's shape, and complex dtypes if the target's is. ``accumulate`` is ``torch.float32`` or ``torch.float64``;
    for complex values, of each of their two parts. What is too large for float32 is added up in float64.
    """
    if target.is_complex():
        parts = [torch.view_as_real(value.to(target.dtype)) for value in values]
        combine(parts, how, torch.view_as_real(target), accumulate)
        return
    flat = [value.reshape(-1) for value in values]
    found = target.view(-1) if target.is_contiguous() else torch.empty(target.numel(), dtype=target.dtype, device="cpu")

    def combine_share(start: int) -> None:
        stop = min(start + _SHARE, found.numel())
        _combine_flat([value[start:stop] for value in flat], how, found[start:stop], accumulate)

    shares = enumerate(range(0, found.numel(), _SHARE))
    Workers(settings.io_threads() if found.numel() > _SHARE else 1, "shardckpt-merge").each(combine_share, shares)
    if not target.is_contiguous():
        target.copy_(found.view(target.shape))


def _combine_flat(
    values: Sequence[torch.Tensor], how: Combination, target: torch.Tensor, accumulate: torch.dtype
) -> None:
    """Fill a flat tensor, block by block, in this thread."""
    width = min(max(_CACHED // (len(values) * accumulate.itemsize), _LEAST), _MOST)
    for start in range(0, target.numel(), width):
        some = slice(start, start + width)
        parts = [value[some] for value in values]
        total = _weigh(parts, how, accumulate)
        if not bool(total.isfinite().all()):
            # a mask of the lowest number, say, whose sum has no place in the dtype, and whose average has
            # no sum of these is larger than its largest value
            wide = _weigh(parts, how.shrink(how.exponent + len(parts).bit_length()), torch.float64)
            if how.is_average:  # rounding must not lead out of float64 either
                bounds = (functools.reduce(bound, [part.double() for part in parts]) for bound in _BOUNDS)
                wide.clamp_(*bounds)
            total = torch.where(total.isfinite(), total, wide)
        # which NaN comes of two depends on their order
        target[some] = total.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)


def _weigh(values: Sequence[torch.Tensor], how: Combination, accumulate: torch.dtype) -> torch.Tensor:
    def multiply() -> list[torch.Tensor]:
        return [value.to(accumulate) * weight for value, weight in zip(values, how.weights, strict=True)]

    total = _add(multiply())
    is_zero = total == 0
    if bool(is_zero.any()):
        # the lesser and the greater of 0 and -0 are one of both, twice, which depends on their order
        is_negative = functools.reduce(torch.logical_and, [term.signbit() for term in multiply()])
        total.masked_fill_(is_zero & ~is_negative, 0.0)
    return total if how.divisor == 1 else total.div_(how.divisor)


def _add(terms: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors, whose elements are sorted first, in place: addition of floats is not associative."""
    spare = torch.empty_like(terms[0])
    for low, high in list_comparisons(len(terms)):
        torch.minimum(terms[low], terms[high], out=spare)
        torch.maximum(terms[low], terms[high], out=terms[high])
        terms[low], spare = spare, terms[low]
    total = terms[0]
    for higher in terms[1:]:
        total += higher
    return total


@functools.cache
def list_comparisons(count: int) -> tuple[tuple[int, int], ...]:
    """Return which pairs of places are compared, in order, so that the least is first in each: then all are sorted.

    It is Batcher's merge exchange sort: 31 pairs for 10 values, where inserting one by one takes 45.
    """
    pairs = []
    step = 1 << max(count - 1, 0).bit_length() >> 1
    first = step
    while step:
        distance, run, rest = step, first, 0
        while True:
            pairs += [(low, low + distance) for low in range(count - distance) if low & step == rest]
            if run == step:
                break
            distance, run, rest = run - step, run >> 1, step
        step >>= 1
    return tuple(pairs)


class Angle:
    """The angle between two tensors, from sums that are added up block by block.

    The blocks must be the same each time: then so are the sums.
    """

    def __init__(self) -> None:
        self._sums: tuple[list[float], list[float], list[float]] = ([], [], [])

    def add(self, first: torch.Tensor, second: torch.Tensor) -> None:
        """Add a block of both."""
        kind = functools.reduce(torch.promote_types, (first.dtype, second.dtype), torch.float64)
        wide = (each.to(kind) for each in (first, second))  # both complex where one is
        one, other = ((torch.view_as_real(each) if each.is_complex() else each).reshape(-1) for each in wide)
        for sums, product in zip(self._sums, (one * other, one * one, other * other), strict=True):
            whole = product.numel() // _ROW * _ROW
            sums.extend(product[:whole].view(-1, _ROW).sum(1).tolist())
            sums.append(product[whole:].sum().item())

    def interpolate(self, part: float, key: str) -> Combination:
        """Return the spherical interpolation of the two tensors.

        ``part`` is how far from the first to the second, from 0 to 1. A value that is not finite is an error: there is
        no angle.
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
