"""Memory that staged tensors are copied into: taken from the system once, touched once, and used again."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardckpt import settings
from shardckpt.storage import naming

if TYPE_CHECKING:
    from shardckpt.background.copying import Layout

logger = logging.getLogger(__name__)

_ROUND = 2 << 20
#: Seconds after which a save that waits for memory says so.
_PATIENCE = 30.0


class StagingBuffer:
    """A run of memory that another process can map by its path.

    Args:
        nbytes: Its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.owner = os.getpid()
        self._fd, self.path = _memory_file()
        try:
            with naming(f"take {nbytes} bytes of staging memory as", self.path):
                os.ftruncate(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self.memory = _mapped(self._fd, nbytes)
        self._pinned = False
        self._viewed: tuple[Layout, list[torch.Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.memory.numel()

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """The tensors that stand in it; the last ones are kept, for the next save has the same."""
        if self._viewed is None or self._viewed[0] is not layout:
            with torch.inference_mode(False):  # the next save may be staged in another mode
                self._viewed = (layout, layout.views(self.memory))
        return list(self._viewed[1])

    def pin(self) -> None:
        """Let CUDA devices copy into it behind the host's back; without effect where there is none."""
        if self._pinned or not torch.cuda.is_available():
            return
        error = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.nbytes, 0)  # type: ignore[no-untyped-call]
        self._pinned = not int(error)
        if not self._pinned:
            logger.warning(
                "cannot pin %d bytes of staging memory (CUDA error %s): copies are slower", self.nbytes, error
            )

    def close(self) -> None:
        """Give the memory back to the system, once no tensor views it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        """Let go of it in a fork of the process that it belongs to."""
        self._viewed = None
        os.close(self._fd)


def attach(path: str, nbytes: int) -> torch.Tensor:
    """The memory of another process's staging buffer."""
    fd = os.open(path, os.O_RDWR)
    try:
        return _mapped(fd, nbytes)
    finally:
        os.close(fd)


class StagingBufferPool:
    """At most as many buffers as saves may be staged at a time; a save that wants one more waits for a free one.

    Not a :class:`shardckpt.storage.BufferPool`: another process maps these buffers by their paths, and each may have
    all bytes of a rank. So their number is bounded, and one that is too small goes before a larger one comes.
    """

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []
        self._taken = 0
        self._changed = threading.Condition()

    def acquire(self, nbytes: int) -> StagingBuffer:
        """Return a buffer of at least this size; :meth:`release` ends its use."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._taken < settings.staged_saves(), _PATIENCE):
                logger.warning(
                    "a background save has waited %g s for one of %d that are still being written; they are slow, or "
                    "were staged and never run",
                    _PATIENCE,
                    self._taken,
                )
            self._taken += 1
            fitting = sorted((free for free in self._free if free.nbytes >= nbytes), key=lambda free: free.nbytes)
            if fitting:
                self._free.remove(fitting[0])
                return fitting[0]
            while self._free:  # all too small: what replaces them must not come on top of them
                self._free.pop().close()
            try:
                return StagingBuffer(max(_ROUND, -(-nbytes // _ROUND) * _ROUND))
            except BaseException:
                self._taken -= 1
                raise

    def release(self, buffer: StagingBuffer) -> None:
        """The buffer's contents are no longer needed; in a fork, whose parent goes on using them, nothing happens."""
        if buffer.owner != os.getpid():
            return
        with self._changed:
            self._taken -= 1
            self._free.append(buffer)
            self._changed.notify_all()

    def clear(self) -> None:
        """Give the memory of the buffers that nothing uses back to the system."""
        with self._changed:
            while self._free:
                self._free.pop().close()

    def forget(self) -> None:
        """In a fork: what it has inherited is still its parent's, who goes on writing there."""
        for buffer in self._free:
            buffer.forget()
        self.__init__()  # type: ignore[misc]


def _memory_file() -> tuple[int, str]:
    """A file without a name, in memory if Python can do that, and the path by which this user's processes open it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("shardckpt-staging")
    else:
        fd, name = tempfile.mkstemp(prefix="shardckpt-staging-")
        Path(name).unlink()
    return fd, f"/proc/{os.getpid()}/fd/{fd}"


def _mapped(fd: int, nbytes: int) -> torch.Tensor:
    memory: Any = mmap.mmap(fd, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)


__all__ = ["StagingBuffer", "StagingBufferPool", "attach"]
