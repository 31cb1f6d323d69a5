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
    if stored.is_complex != requested.is_complex:
        return True  # torch warns about the imaginary part that is lost
    try:
        torch.zeros(1, dtype=stored, device="cpu").to(requested)
    except NotImplementedError:
        return False
    return True
