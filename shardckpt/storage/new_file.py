"""A new file: full pages are written past the page cache (O_DIRECT) where the file system can, the rest through it.

Buffered writes touch fresh pages of the page cache, which takes 2 to 3 CPU seconds per GiB on the machine of the
measurements; direct writes take less than 0.1, and leave the processor to the training.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError
from shardckpt.storage.buffers import BLOCK_BYTES, block_pool
from shardckpt.storage.direct import allocate, find_address, open_direct
from shardckpt.storage.filesystem import open_new, wrap_os_errors, write_all, write_some
from shardckpt.tensors.memory import PAGE

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_CLOSED = -1
#: Most bytes to allocate ahead of the bytes that are sure to come: other files may need the space.
_AHEAD = 16 << 20
#: Bytes. Fewer go through the page cache: a direct write of so few takes longer.
DIRECT_BYTES = 64 << 10
#: Errors by which a file system refuses direct writes, in general or from this memory.
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


class _CachedWrites:
    """Limits concurrent writes through the page cache to the number of cores: they copy, and more are slower."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Replace the semaphore: the threads that held it do not exist in a forked child, and never release it."""
        self.turns = threading.Semaphore(os.cpu_count() or 1)


_cached_writes = _CachedWrites()
os.register_at_fork(after_in_child=_cached_writes.renew)


class NewFile:
    """A file that did not exist before; several threads may write to it, each to a range of its own.

    Args:
        nbytes: The least size in bytes, if it is known: the space is allocated in one call, before the first direct
            write.
        shared: Whether other ranks write to the file, too, which has ``nbytes`` bytes: it may exist already.
        count: Called by each thread with the number of bytes that it has written since the last call.
    """

    def __init__(
        self, path: Path, nbytes: int = 0, *, shared: bool = False, count: Callable[[int], None] | None = None
    ) -> None:
        self._count = count
        self.path = path
        self.expected = nbytes
        self._fd = open_new(path, shared=shared)
        self._direct = _CLOSED
        self._tried_direct = False
        self._alignment = 0
        self._allocated = 0
        self._allocates = True

    def reserve(self, size: int) -> None:
        """Open the file for direct writes, and allocate at least ``size`` bytes; for one thread at a time."""
        if not self._tried_direct:
            self._open_direct()
        if self._alignment and self._allocates and size > self._allocated:
            # an eighth more each time: a file that grows record by record is extended in few calls
            ahead = self.expected if size <= self.expected else size + min(size // 8, _AHEAD)
            self._allocated = self._allocate(ahead, size) or self._allocate(size, size)
            self._allocates = self._allocated > 0

    def reserve_all(self) -> None:
        """Open the file for direct writes, and give it its size: for a file that other ranks write to, too."""
        self._open_direct()
        self._allocates = False
        if not allocate(self._fd, self.expected):
            # no error: without space for all of it, or without the call, a full disk shows when it is written to
            with wrap_os_errors("extend", self.path):
                os.ftruncate(self._fd, self.expected)

    @property
    def is_cached(self) -> bool:
        """Whether all writes go through the page cache: before :meth:`reserve`, and where it found no direct writes."""
        return not self._alignment

    def copies(self, view: memoryview, offset: int) -> bool:
        """Return whether the processor copies the view's pages when they are written at ``offset``.

        The page cache copies. A direct write does not, if address and offset are equal modulo the alignment; else the
        pages go through a block.
        """
        start, alignment = find_address(view), self._alignment
        return start is None or not alignment or (start - offset) % alignment != 0

    def write(self, view: memoryview, offset: int, what: str = "") -> None:
        """Write bytes: full pages by direct writes, if they are enough, the rest through the page cache.

        The offset need not be a page boundary. Errors name ``what`` (a key).
        """
        done = 0
        low, high = full_pages(offset, view.nbytes)
        if self._alignment and high - low >= DIRECT_BYTES:
            write = self._copied_write if self.copies(view, offset) else self._direct_write
            done = low + write(view[low:high], offset + low, what)
            self._write_cached(view[:low], offset, what)
        self._write_cached(view[done:], offset + done, what)
        if self._count is not None:
            self._count(view.nbytes)

    def finish(self, size: int) -> None:
        """Cut the file to ``size`` bytes, which frees the space allocated beyond them, and fsync it.

        It is a StorageError if the file has fewer bytes: something else wrote to it.
        """
        if self._cut(size) < size:
            raise StorageError(
                f"{self.path}: it has fewer bytes than the {size} that were written: another process changed it"
            )
        with wrap_os_errors("fsync", self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close it; no thread may be writing: the number of a closed descriptor may be another file's by then.

        It is closed even if this raises a StorageError, where the system reports an error of earlier writes, as network
        file systems do.
        """
        # forgotten first: a descriptor is gone even if its close fails, and a second close would hit another file's
        opened, self._fd, self._direct = (self._fd, self._direct), _CLOSED, _CLOSED
        with ExitStack() as stack:
            for fd in opened:
                if fd != _CLOSED:
                    stack.callback(self._close, fd)

    def _open_direct(self) -> None:
        """Open the file for direct writes, where the file system has them."""
        self._tried_direct = True
        if (direct := open_direct(self.path, self._fd)) is not None:
            self._direct, self._alignment = direct

    def _close(self, fd: int) -> None:
        with wrap_os_errors("close", self.path):
            os.close(fd)

    def _write_cached(self, view: memoryview, offset: int, what: str) -> None:
        if view.nbytes:
            with _cached_writes.turns:
                write_all(self._fd, self.path, view, offset, what)

    def _allocate(self, size: int, needed: int) -> int:
        """Allocate, and return the size; 0 if that failed. It is no error: a full disk shows when it is written to.

        A file system may keep the blocks of a failed allocation (ext4 does): the file is cut to the size that it needs.
        """
        if allocate(self._fd, size):
            return size
        self._cut(needed)
        return 0

    def _cut(self, size: int) -> int:
        """Truncate the file to this size if it is larger; return the size before."""
        with wrap_os_errors("truncate", self.path):
            found = os.fstat(self._fd).st_size
            if found > size:
                os.ftruncate(self._fd, size)
        return found

    def _copied_write(self, view: memoryview, offset: int, what: str) -> int:
        """Write from memory with an unsuitable address, through a block; return the number of bytes written."""
        with block_pool.acquired() as block:
            for start in range(0, view.nbytes, BLOCK_BYTES):
                piece = view[start : start + BLOCK_BYTES]
                block[: piece.nbytes] = piece
                done = self._direct_write(block[: piece.nbytes], offset + start, what)
                if done < piece.nbytes:
                    return start + done
        return view.nbytes

    def _direct_write(self, view: memoryview, offset: int, what: str) -> int:
        """Write directly; return the number of bytes written.

        All, unless the file system refuses or stops inside a page; the caller writes the rest through the page cache.
        """
        done = 0
        try:
            while done < view.nbytes and done % PAGE == 0 and self._alignment:
                done += write_some(self._direct, self.path, view[done:], offset + done, what, _REFUSALS)
        except OSError:
            self._alignment = 0  # no further direct writes to this file
        return done


def full_pages(offset: int, nbytes: int) -> tuple[int, int]:
    """Return the range of a view of ``nbytes`` bytes that fills full pages of the file, if it begins at ``offset``.

    (start, stop) in the view; the stop may be less than the start if the view fills no page.
    """
    return -offset % PAGE, (offset + nbytes) // PAGE * PAGE - offset
