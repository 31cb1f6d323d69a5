"""Group items that are read or summed together, by their bytes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_T = TypeVar("_T")


def batch_by_bytes(
    items: Iterable[_T], size: Callable[[_T], int], most: int, most_items: int = sys.maxsize
) -> Iterator[list[_T]]:
    """Batch items in their order: a batch has at most ``most`` bytes, unless it has a single larger item.

    No batch is empty.
    """
    batch: list[_T] = []
    total = 0
    for item in items:
        nbytes = size(item)
        if batch and (total + nbytes > most or len(batch) == most_items):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += nbytes
    if batch:
        yield batch
