"""Ends of checked spans whose beginning was read: the next read of the file, in order, takes them.

A digest is of a whole segment, so a box that ends inside one has read and checked all of it. A reader of many boxes
that follow each other would otherwise read and check most segments twice, and small boxes several times.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from shardckpt.storage.buffers import BLOCK_BYTES, block_pool

if TYPE_CHECKING:
    from shardckpt.storage.buffers import Buffer


class _End(NamedTuple):
    """The bytes that are kept: from ``low`` to ``high`` of a block of the pool."""

    block: Buffer
    low: int
    high: int


class ReadEnds:
    """The ends that are kept, in blocks of the pool; for several threads.

    At most ``most`` bytes of blocks are kept, but always one block; the oldest goes first.
    """

    def __init__(self, most: int) -> None:
        self._most = max(most // BLOCK_BYTES, 1)
        self._lock = threading.Lock()
        #: By the file and the offset of the first byte, the oldest first.
        self._ends: dict[tuple[str, int], _End] = {}

    def keep(self, name: str, offset: int, block: Buffer, low: int, high: int) -> None:
        """Keep a part of a block, which goes back to the pool when it was taken."""
        free = [block] if low == high else []
        with self._lock:
            if low < high:
                before = self._ends.pop((name, offset), None)
                free += [] if before is None else [before.block]
                self._ends[name, offset] = _End(block, low, high)
            while len(self._ends) > self._most:
                free.append(self._ends.pop(next(iter(self._ends))).block)
        for each in free:
            block_pool.release(each)

    def take(self, name: str, offset: int, memory: memoryview) -> int:
        """Fill the beginning of memory with the kept bytes from an offset on; return the number of bytes filled."""
        with self._lock:
            end = self._ends.pop((name, offset), None)
        if end is None:
            return 0
        block, low, high = end
        count = min(high - low, memory.nbytes)
        memory[:count] = block.view[low : low + count]
        self.keep(name, offset + count, block, low + count, high)
        return count

    def close(self) -> None:
        """Give all blocks back."""
        with self._lock:
            blocks = [end.block for end in self._ends.values()]
            self._ends.clear()
        for block in blocks:
            block_pool.release(block)
