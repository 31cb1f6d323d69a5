"""Memory that is used again and again: fresh pages cost more than the bytes that they take."""

from __future__ import annotations

import mmap
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardckpt.tensors import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of a buffer of :data:`block_pool`.
BLOCK_BYTES = 1 << 20


class Buffer:
    """Memory at an address that is a multiple of 64; its contents are whatever was there before.

    Args:
        nbytes: The size, at least 1.
        pinned: Whether a CUDA device shall copy from it behind the host's back. Other memory begins on a page, and is
            private: what a forked child writes there stays its own.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.pinned = pinned
        if pinned:
            self.view = tensor_bytes(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))
        else:  # pages of its own: direct writes from torch's memory take 5 to 10% longer
            self.view = memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class BufferPool:
    """Buffers for the threads of a process; the last used one comes first: its pages are there, perhaps in the cache.

    Args:
        nbytes: The size of each; more where more is asked for.
        kept: How many wait for their next use at most; more are given back to the system.
    """

    def __init__(self, nbytes: int, kept: int = sys.maxsize) -> None:
        self._nbytes = nbytes
        self._kept = kept
        self._free: dict[bool, list[Buffer]] = {False: [], True: []}

    def acquire(self, nbytes: int = 0, *, pinned: bool = False) -> Buffer:
        """Return a buffer of at least ``nbytes`` bytes; :meth:`release` ends its use."""
        try:
            found = self._free[pinned].pop()
        except IndexError:
            found = None
        if found is None or found.view.nbytes < nbytes:
            found = Buffer(max(nbytes, self._nbytes), pinned=pinned)
        return found

    def release(self, buffer: Buffer) -> None:
        """Let others use the buffer."""
        free = self._free[buffer.pinned]
        if len(free) < self._kept:
            free.append(buffer)

    @contextmanager
    def acquired(self, nbytes: int = 0, *, pinned: bool = False) -> Iterator[memoryview]:
        """Acquire a buffer, and release it at the end of the block; gives its bytes."""
        buffer = self.acquire(nbytes, pinned=pinned)
        try:
            yield buffer.view
        finally:
            self.release(buffer)


#: Blocks of the process, for writers and for runs of small items.
block_pool = BufferPool(BLOCK_BYTES, kept=16)


__all__ = ["BLOCK_BYTES", "Buffer", "BufferPool", "block_pool"]
