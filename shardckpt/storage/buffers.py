"""Pools of reused buffers: the first touch of a fresh page costs more than to copy the bytes that go into it."""

from __future__ import annotations

import mmap
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardckpt.tensors.memory import tensor_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Size of the buffers of :data:`block_pool`, in bytes.
BLOCK_BYTES = 1 << 20


class Buffer:
    """Memory at an address that is a multiple of 64; its contents are undefined.

    A CUDA device copies asynchronously from pinned memory. Other memory begins on a page boundary, and is private: the
    parent does not see the writes of a forked child.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.pinned = pinned
        if pinned:
            self.view = tensor_bytes(torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True))
        else:  # not torch.empty: direct writes from memory of torch's allocator take 5 to 10% longer
            self.view = memoryview(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class BufferPool:
    """Buffers for the threads of a process, last in first out: the pages of the last one may still be in the cache.

    Each has ``nbytes`` bytes if no more is requested. Of each kind at most ``kept`` free ones are kept; further ones go
    back to the system.
    """

    def __init__(self, nbytes: int, kept: int = sys.maxsize) -> None:
        self._nbytes = nbytes
        self._kept = kept
        self._free: dict[bool, list[Buffer]] = {False: [], True: []}

    def acquire(self, nbytes: int = 0, *, pinned: bool = False) -> Buffer:
        """Return a buffer of at least ``nbytes`` bytes; :meth:`release` ends its use."""
        try:  # without a lock, and without a look at the length: pop() is one step for all threads
            found = self._free[pinned].pop()
        except IndexError:
            found = None
        if found is None or found.view.nbytes < nbytes:
            found = Buffer(max(nbytes, self._nbytes), pinned=pinned)
        return found

    def release(self, buffer: Buffer) -> None:
        """Return a buffer to the pool; the caller must not use it after that."""
        free = self._free[buffer.pinned]
        if len(free) < self._kept:
            free.append(buffer)

    @contextmanager
    def acquired(self, nbytes: int = 0, *, pinned: bool = False) -> Iterator[memoryview]:
        """Return a context manager that acquires a buffer, gives its bytes, and releases it at the end of the block."""
        buffer = self.acquire(nbytes, pinned=pinned)
        try:
            yield buffer.view
        finally:
            self.release(buffer)


#: Blocks of this process, for writers and for groups of small items.
block_pool = BufferPool(BLOCK_BYTES, kept=16)
