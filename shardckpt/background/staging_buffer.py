"""Staging buffers: memory for copies of tensors, allocated once and reused, since the first touch of a page is dear."""

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
from shardckpt.errors import CheckpointingException
from shardckpt.storage.filesystem import wrap_os_errors

if TYPE_CHECKING:
    from shardckpt.background.copying import Layout

logger = logging.getLogger(__name__)

#: Sizes are rounded up to this, in bytes.
_ROUND = 2 << 20
#: Seconds after which a save that waits for a buffer logs a warning.
_PATIENCE = 30.0
_PROC = Path("/proc")


class StagingBuffer:
    """Memory that another process of this user can map by its path."""

    def __init__(self, nbytes: int) -> None:
        self.owner = os.getpid()
        self._fd, self.path = _memory_file()
        try:
            with wrap_os_errors(f"take {nbytes} bytes of staging memory as", self.path):
                os.ftruncate(self._fd, nbytes)
                self.memory = _map(self._fd, nbytes)
        except BaseException:
            os.close(self._fd)
            raise
        self._pinned = False
        self._viewed: tuple[Layout, list[torch.Tensor]] | None = None

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.memory.numel()

    def views(self, layout: Layout) -> list[torch.Tensor]:
        """Return the tensors in the buffer; the last list is cached, since most saves have the same layout."""
        if self._viewed is None or self._viewed[0] is not layout:
            with torch.inference_mode(False):  # the cached views must work outside inference mode, too
                self._viewed = (layout, layout.views(self.memory))
        return list(self._viewed[1])

    def pin(self) -> None:
        """Pin the memory, so that CUDA devices copy into it asynchronously; without effect where there is no CUDA."""
        if self._pinned or not torch.cuda.is_available():
            return
        error = torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.nbytes, 0)  # type: ignore[no-untyped-call]
        self._pinned = not int(error)
        if not self._pinned:
            logger.warning(
                "cannot pin %d bytes of staging memory (CUDA error %s): copies are slower", self.nbytes, error
            )

    def close(self) -> None:
        """Unpin the memory and close the file; the system frees the memory with the last tensor that views it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        """Close the file without unpinning: in a fork the memory is still the parent's."""
        self._viewed = None
        os.close(self._fd)


def attach(path: str, nbytes: int) -> torch.Tensor:
    """Map another process's staging buffer, and return it as a uint8 tensor."""
    fd = os.open(path, os.O_RDWR)
    try:
        return _map(fd, nbytes)
    finally:
        os.close(fd)


class StagingBufferPool:
    """At most ``SHARDCKPT_STAGED_SAVES`` buffers; a save that needs one more waits.

    Not a :class:`shardckpt.storage.BufferPool`: another process maps these buffers by their paths, and each may hold
    all bytes of a rank. So their number is bounded, and buffers that are too small are freed before a larger one is
    allocated.
    """

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []
        self._taken = 0
        self._changed = threading.Condition()

    def acquire(self, nbytes: int, most: int | None = None) -> StagingBuffer:
        """Wait for a free buffer of at least ``nbytes`` bytes, and return it; :meth:`release` ends its use.

        ``most`` lowers the limit of the setting: buffers in use at a time, with this one.
        """
        limit = min(settings.staged_saves(), most or settings.staged_saves())
        with self._changed:
            while not self._changed.wait_for(lambda: self._taken < limit, _PATIENCE):
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
            while self._free:  # all are too small: free them first, so that memory never holds both
                self._free.pop().close()
            try:
                return StagingBuffer(round_up(nbytes))
            except BaseException:
                self._taken -= 1
                raise

    def release(self, buffer: StagingBuffer) -> None:
        """Return a buffer to the pool; without effect in a fork, whose parent still uses the buffer."""
        if buffer.owner != os.getpid():
            return
        with self._changed:
            self._taken -= 1
            self._free.append(buffer)
            self._changed.notify_all()

    def clear(self) -> None:
        """Return the memory of free buffers to the system."""
        with self._changed:
            while self._free:
                self._free.pop().close()

    def forget(self) -> None:
        """Drop all buffers in a fork: the memory is still the parent's, which writes to it."""
        for buffer in self._free:
            buffer.forget()
        # with a new lock: a thread of the parent, which the fork does not have, may have held the old one
        self.__init__()  # type: ignore[misc]


def round_up(nbytes: int) -> int:
    """Return the size of a buffer for so many bytes."""
    return max(_ROUND, -(-nbytes // _ROUND) * _ROUND)


def check_mappable() -> None:
    """Raise if no other process can map staged memory: ``/proc`` is missing, or shows other processes."""
    fd, path = _memory_file()
    try:
        is_same = os.path.samestat(os.stat(path), os.fstat(fd))  # noqa: PTH116 - follows the link to a nameless file
        why = "it is another file"
    except OSError as exc:
        is_same, why = False, f"{type(exc).__name__}: {exc}"
    finally:
        os.close(fd)
    if not is_same:
        raise CheckpointingException(
            f"no other process can write background saves here: it would map the staged tensors by {path}, and {why}. "
            "Mount /proc in this container, or let a thread write: CheckpointConfig(async_mode='async'), "
            "AsyncCallsQueue(persistent=False)"
        )


def _memory_file() -> tuple[int, str]:
    """Create a file without a name, in memory where possible; return its descriptor, and a path to open it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("shardckpt-staging")
    else:
        fd, name = tempfile.mkstemp(prefix="shardckpt-staging-")
        Path(name).unlink()
    return fd, f"{_PROC}/{os.getpid()}/fd/{fd}"


def _map(fd: int, nbytes: int) -> torch.Tensor:
    memory: Any = mmap.mmap(fd, nbytes)
    return torch.frombuffer(memory, dtype=torch.uint8)
