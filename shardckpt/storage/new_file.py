"""A file that is being written: whole pages past the page cache where the file system can, the rest through it."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from shardckpt.storage.buffers import BLOCK_BYTES, give_back, lease
from shardckpt.storage.direct import PAGE, address, allocate, open_direct
from shardckpt.storage.filesystem import naming, open_new, write_all, write_some

if TYPE_CHECKING:
    from pathlib import Path

_CLOSED = -1
#: Space that is set aside ahead of what is known to come; a file's size at most.
_AHEAD = 64 << 20
#: How a file system says that it has no direct writes, or not of this memory.
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
#: Writes through the page cache at a time: they copy, and more of them than cores are slower.
_processors = threading.Semaphore(os.cpu_count() or 1)


class NewFile:
    """A file that did not exist before; any thread may write to it, each to pages of its own.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_new(path)
        self._direct: int | None = None
        self._alignment = 0
        self._allocated = 0
        self._allocates = True

    def reserve(self, size: int) -> None:
        """Get ready for :meth:`write_pages` in a file of at least ``size`` bytes; for one thread at a time."""
        if self._direct is None:
            self._direct, self._alignment = open_direct(self.path, self._fd)
        if self._alignment and self._allocates and size > self._allocated:
            self._allocated = self._allocate(size + min(size, _AHEAD)) or self._allocate(size) or self._allocated

    def copies(self, view: memoryview, offset: int) -> bool:
        """Whether pages of the view, which begins at ``offset`` of the file, are copied on their way to the disk.

        Direct writes need addresses that lie as the offsets do; and without them the page cache has a copy.
        """
        start, alignment = address(view), self._alignment
        return start is None or not alignment or (start - offset) % alignment != 0

    def write(self, view: memoryview, offset: int, what: str = "") -> None:
        """Write any bytes; ``what`` (a key) is named in errors."""
        with _processors:
            write_all(self._fd, self.path, [view], offset, what)

    def write_pages(self, view: memoryview, offset: int, what: str = "") -> None:
        """Write whole pages to whole pages: ``offset`` and the view's length are multiples of ``PAGE``."""
        done = 0
        if self._alignment:
            write = self._copied_write if self.copies(view, offset) else self._direct_write
            done = write(view, offset, what)
        self.write(view[done:], offset + done, what)

    def finish(self, size: int) -> None:
        """Make the file's bytes durable, and no more than ``size`` of them."""
        if self._allocated > size:
            with naming("truncate", self.path):
                os.ftruncate(self._fd, size)
        with naming("fsync", self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close it; nothing may be writing."""
        for fd in (self._fd, self._direct):
            if fd is not None and fd != _CLOSED:
                os.close(fd)
        self._fd = self._direct = _CLOSED

    def _allocate(self, size: int) -> int:
        """The size that was set aside, or 0: what does not fit shows when it is written."""
        self._allocates = allocate(self._fd, size)
        return size if self._allocates else 0

    def _copied_write(self, view: memoryview, offset: int, what: str) -> int:
        """Write from memory whose address does not fit; how many bytes were written."""
        block = lease()
        try:
            for start in range(0, view.nbytes, BLOCK_BYTES):
                piece = view[start : start + BLOCK_BYTES]
                block.view[: piece.nbytes] = piece
                done = self._direct_write(block.view[: piece.nbytes], offset + start, what)
                if done < piece.nbytes:
                    return start + done
        finally:
            give_back(block)
        return view.nbytes

    def _direct_write(self, view: memoryview, offset: int, what: str) -> int:
        """How many bytes were written: all, unless direct writes are refused or end inside a page."""
        done, direct = 0, self._direct or 0
        try:
            while done < view.nbytes and done % PAGE == 0 and self._alignment:
                done += write_some(direct, self.path, [view[done:]], offset + done, what, _REFUSALS)
        except OSError:
            self._alignment = 0
        return done


__all__ = ["NewFile"]
