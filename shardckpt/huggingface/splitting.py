"""Split tensors over files of limited size."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def split_by_size(sizes: Iterable[tuple[str, int]], limit: int) -> list[list[str]]:
    """Split tensors over files in their order; a tensor above the limit gets its own file.

    Args:
        sizes: Name and bytes of every tensor, in order.
        limit: Bytes of tensors in a file.

    Returns:
        The names in each file.
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


__all__ = ["split_by_size"]
