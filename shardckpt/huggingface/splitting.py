"""Dealing tensors to files of limited size, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def split(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Names a file: each takes what comes next as long as it fits; what is larger than the limit has its own file.

    Args:
        sizes: Name and bytes of every tensor, in order.
        limit: Bytes of tensors in a file.
    """
    files: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, nbytes in sizes:
        if nbytes > limit:
            files.append([name])
            continue
        if current and filled + nbytes > limit:
            files.append(current)
            current, filled = [], 0
        current.append(name)
        filled += nbytes
    return [*files, current] if current else files


__all__ = ["split"]
