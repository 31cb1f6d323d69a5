"""Blocks of page-aligned memory that are used again and again: fresh pages cost more than the bytes that they take."""

from __future__ import annotations

import mmap

BLOCK_BYTES = 1 << 20
#: Blocks that wait for their next use, in the process; more are given back to the system.
_KEPT = 16


class Block:
    """``BLOCK_BYTES`` bytes that begin on a page."""

    def __init__(self) -> None:
        # private, so that what a forked child writes here stays its own
        self.memory = mmap.mmap(-1, BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(self.memory)


_free: list[Block] = []


def lease() -> Block:
    """A block with any content, the last used one first: its pages are there, perhaps in the cache."""
    try:
        return _free.pop()
    except IndexError:
        return Block()


def give_back(block: Block) -> None:
    """Let others use the block."""
    if len(_free) < _KEPT:
        _free.append(block)


__all__ = ["BLOCK_BYTES", "Block", "give_back", "lease"]
