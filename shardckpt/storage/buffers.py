"""Page-aligned memory that is used again and again: fresh pages cost more than the bytes that they take."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from shardckpt.tensors import PAGE, view_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Bytes of a buffer of :data:`block_pool`.
BLOCK_BYTES = 1 << 20


class Buffer:
    """Memory that begins on a page; its contents are whatever was there before.

    torch owns it, because a thread of gloo may free it last, when the interpreter is gone. It is private memory: what a
    forked child writes there stays its own.

    Args:
        nbytes: The size.
        pinned: Whether a CUDA device shall copy from it behind the host's back.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        memory = torch.empty(nbytes + PAGE, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        start = -memory.data_ptr() % PAGE
        self.pinned = pinned
        self.tensor = memory[start : start + nbytes]
        self.view = view_tensor(self.tensor)


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
