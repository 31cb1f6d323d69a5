"""Copying what a save is to write, so that the training can go on with its own tensors."""

from __future__ import annotations

import os
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardckpt.background.copying import Copies, Layout
from shardckpt.background.staging_buffer import StagingBuffer, StagingBufferPool, attach

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardckpt.strategy import BackgroundWork

_pool = StagingBufferPool()
os.register_at_fork(after_in_child=_pool.forget)


@dataclass
class StagedWork:
    """Work whose tensors are copies in a staging buffer.

    It travels to a thread as it is, and to a process by the path of the buffer.
    """

    work: BackgroundWork
    layout: Layout
    buffer: StagingBuffer | None
    path: str
    nbytes: int

    def __post_init__(self) -> None:
        if self.buffer is not None:  # who is staged and then forgotten must not keep the memory from others
            self._release = weakref.finalize(self, _pool.release, self.buffer)
            self._release.atexit = False

    @contextmanager
    def opened(self) -> Iterator[BackgroundWork]:
        """The work, with its tensors."""
        if self.buffer is None:
            self.work.tensors = self.layout.views(attach(self.path, self.nbytes))
        else:
            self.work.tensors = self.buffer.views(self.layout)
        try:
            yield self.work
        finally:
            self.work.tensors = []

    def release(self) -> None:
        """The copies are no longer needed."""
        if self.buffer is not None:
            self.buffer = None
            self._release()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_release"} | {"buffer": None}


def stage(work: BackgroundWork, layout: Layout | None = None) -> StagedWork:
    """Copy the work's tensors; when this returns, their owner may change them.

    At most ``SHARDCKPT_STAGED_SAVES`` saves are staged at a time: for the next one this waits until one is written.

    Args:
        work: What is to be written.
        layout: Of an earlier save of tensors with the same dtypes and shapes.
    """
    tensors, work.tensors = work.tensors, []
    copies = Copies(work.keys, tensors, layout)
    buffer = _pool.acquire(copies.layout.nbytes)
    try:
        if copies.uses_cuda:
            buffer.pin()
        copies.run(buffer.views(copies.layout))
    except BaseException:
        _pool.release(buffer)
        raise
    return StagedWork(work, copies.layout, buffer, buffer.path, buffer.nbytes)


def release_memory() -> None:
    """Give staging memory that no save uses back to the system."""
    _pool.clear()


__all__ = ["StagedWork", "release_memory", "stage"]
