"""Copy the tensors of a save to a staging buffer, so that the training may change its own tensors."""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.background.copying import ALIGNED, Copies, Layout
from shardckpt.background.staging_buffer import StagingBuffer, StagingBufferPool, attach, round_up
from shardckpt.tensors.memory import LARGE, PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.strategy import BackgroundWork

_pool = StagingBufferPool()
os.register_at_fork(after_in_child=_pool.forget)


@dataclass
class StagedWork:
    """Background work whose tensors are copies in a staging buffer.

    A thread gets the object itself. A process gets it pickled, without the buffer, and maps the buffer by its path.

    Attributes:
        layout: The places of the tensors in the buffer.
        buffer: None where the object was pickled, and once the buffer is released.
        nbytes: Size of the buffer in bytes.
    """

    work: BackgroundWork
    layout: Layout
    buffer: StagingBuffer | None
    path: str
    nbytes: int

    def __post_init__(self) -> None:
        if self.buffer is not None:  # a request that is staged and never run must not hold the buffer for ever
            self._release = weakref.finalize(self, _pool.release, self.buffer)
            self._release.atexit = False

    @contextmanager
    def open(self) -> Iterator[BackgroundWork]:
        """Return a context manager that gives the work with its tensors."""
        if self.buffer is None:
            self.work.tensors = self.layout.views(attach(self.path, self.nbytes))
        else:
            self.work.tensors = self.buffer.views(self.layout)
        try:
            yield self.work
        finally:
            self.work.tensors = []

    def release(self) -> None:
        """Return the buffer to the pool; without effect if that was done."""
        if self.buffer is not None:
            self.buffer = None
            self._release()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_release"} | {"buffer": None}


def stage(work: BackgroundWork, layout: Layout | None = None, memory_budget: int | None = None) -> StagedWork:
    """Move the tensors of the work to copies, and return them with the work: the caller may change its own then.

    At most ``SHARDCKPT_STAGED_SAVES`` saves are staged at a time: the next one waits here until one of them is written.
    ``layout`` is the layout of an earlier save of tensors with the same dtypes and shapes. A ``memory_budget`` is for
    copies, in bytes, and has room for one; there are never more at a time than it has room for. A tensor that has no
    memory of its own that holds its values is a ShardingError.
    """
    tensors, work.tensors = work.tensors, []
    copies = Copies(work.keys, tensors, layout)
    nbytes = copies.layout.nbytes
    most = None if memory_budget is None else max(1, memory_budget // max(1, nbytes))
    buffer = _pool.acquire(nbytes, most)
    try:
        if copies.uses_cuda:
            buffer.pin()
        copies.run(buffer.views(copies.layout))
    except BaseException:
        _pool.release(buffer)
        raise
    return StagedWork(work, copies.layout, buffer, buffer.path, buffer.nbytes)


def count_staged_bytes(work: BackgroundWork) -> int:
    """Return the most bytes that the copies of the tensors of the work take."""
    nbytes = [tensor.numel() * tensor.dtype.itemsize for tensor in work.tensors]
    # the padding between the copies: see Layout
    gaps = sum(PAGE if each >= LARGE else ALIGNED for each in nbytes)
    return round_up(sum(nbytes) + gaps)


def release_memory() -> None:
    """Return the memory of free staging buffers to the system."""
    _pool.clear()
