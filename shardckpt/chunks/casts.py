"""Check that torch can cast stored values to the dtype of a destination."""

from __future__ import annotations

import functools

import torch

from shardckpt.errors import ShardingError


def check_cast(key: str, stored: torch.dtype, requested: torch.dtype) -> None:
    """Check that torch can cast stored values to the requested dtype; ShardingError if it cannot."""
    if stored != requested and not _can_cast(stored, requested):
        raise ShardingError(
            f"{key!r} is stored as {stored}, which torch cannot cast to {requested}: load it as {stored}"
        )


@functools.cache
def _can_cast(stored: torch.dtype, requested: torch.dtype) -> bool:
    """Return whether torch has such a cast; it has none for packed dtypes, which store two values per byte."""
    # of complex dtypes the real part: torch warns about an imaginary part that is lost
    source, target = (dtype.to_real() if dtype.is_complex else dtype for dtype in (stored, requested))
    try:
        torch.zeros(1, dtype=source, device="cpu").to(target)
    except RuntimeError:  # NotImplementedError is one; quantized dtypes have others
        return False
    return True
