"""A file that is being written: whole pages past the page cache where the file system can, the rest through it."""

from __future__ import annotations

import errno
import os
import threading
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError
from shardckpt.storage.buffers import BLOCK_BYTES, block_pool
from shardckpt.storage.direct import address, allocate, open_direct
from shardckpt.storage.filesystem import naming, open_new, write_all, write_some
from shardckpt.tensors import PAGE

if TYPE_CHECKING:
    from pathlib import Path

_CLOSED = -1
#: Space that is set aside ahead of what is known to come, at most; others may need it meanwhile.
_AHEAD = 16 << 20
#: Fewer bytes than this go through the page cache at once: a write past it would take longer.
DIRECT_BYTES = 64 << 10
#: How a file system says that it has no direct writes, or not of this memory.
_REFUSALS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


class _Processors:
    """Turns of writes through the page cache: they copy, and more of them than cores are slower."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Free all: in a forked child the threads that had them are gone."""
        self.turns = threading.Semaphore(os.cpu_count() or 1)


_processors = _Processors()
os.register_at_fork(after_in_child=_processors.renew)


class NewFile:
    """A file that did not exist before; any thread may write to it, each bytes of its own.

    Args:
        path: The file.
        nbytes: What it will have at least, if that is known: space for it is set aside in one go, before the first
            pages are written.
    """

    def __init__(self, path: Path, nbytes: int = 0) -> None:
        self.path = path
        self.expected = nbytes
        self._fd = open_new(path)
        self._direct = _CLOSED
        self._asked = False
        self._alignment = 0
        self._allocated = 0
        self._allocates = True

    def reserve(self, size: int) -> None:
        """Get ready for direct writes to a file of at least ``size`` bytes; for one thread at a time."""
        if not self._asked:
            self._asked = True
            self._direct, self._alignment = open_direct(self.path, self._fd)
        if self._alignment and self._allocates and size > self._allocated:
            ahead = self.expected if size <= self.expected else size + min(size // 8, _AHEAD)
            self._allocated = self._allocate(ahead, size) or self._allocate(size, size)
            self._allocates = self._allocated > 0

    @property
    def is_cached(self) -> bool:
        """Whether all goes through the page cache, as it does until :meth:`reserve` has found a way past it."""
        return not self._alignment

    def copies(self, view: memoryview, offset: int) -> bool:
        """Whether pages of the view, which begins at ``offset`` of the file, are copied on their way to the disk.

        Direct writes need addresses that lie as the offsets do; and without them the page cache has a copy.
        """
        start, alignment = address(view), self._alignment
        return start is None or not alignment or (start - offset) % alignment != 0

    def write(self, view: memoryview, offset: int, what: str = "") -> None:
        """Write bytes: the whole pages among them past the page cache, if there are enough, the rest through it.

        Args:
            view: The bytes.
            offset: Where they begin in the file, anywhere in a page.
            what: What they are (a key), named in errors.
        """
        done = 0
        low, high = whole_pages(offset, view.nbytes)
        if self._alignment and high - low >= DIRECT_BYTES:
            write = self._copied_write if self.copies(view, offset) else self._direct_write
            done = low + write(view[low:high], offset + low, what)
            self._write_cached(view[:low], offset, what)
        self._write_cached(view[done:], offset + done, what)

    def finish(self, size: int) -> None:
        """Make the file's bytes durable, which are ``size``: what was set aside behind them is given back."""
        if self._cut(size) < size:
            raise StorageError(
                f"{self.path}: {size} bytes were written, and fewer are there: something else wrote to it"
            )
        with naming("fsync", self.path):
            os.fsync(self._fd)

    def close(self) -> None:
        """Close it; nothing may be writing."""
        for fd in (self._fd, self._direct):
            if fd != _CLOSED:
                os.close(fd)
        self._fd = self._direct = _CLOSED

    def _write_cached(self, view: memoryview, offset: int, what: str) -> None:
        if view.nbytes:
            with _processors.turns:
                write_all(self._fd, self.path, [view], offset, what)

    def _allocate(self, size: int, needed: int) -> int:
        """The size that was set aside, or 0: what does not fit shows when it is written.

        A file system may keep what it got before it failed (ext4 does): no more of it than is needed stays.
        """
        if allocate(self._fd, size):
            return size
        self._cut(needed)
        return 0

    def _cut(self, size: int) -> int:
        """Make the file no longer than this; how long it was."""
        with naming("truncate", self.path):
            found = os.fstat(self._fd).st_size
            if found > size:
                os.ftruncate(self._fd, size)
        return found

    def _copied_write(self, view: memoryview, offset: int, what: str) -> int:
        """Write from memory whose address does not fit; how many bytes were written."""
        with block_pool.acquired() as block:
            for start in range(0, view.nbytes, BLOCK_BYTES):
                piece = view[start : start + BLOCK_BYTES]
                block[: piece.nbytes] = piece
                done = self._direct_write(block[: piece.nbytes], offset + start, what)
                if done < piece.nbytes:
                    return start + done
        return view.nbytes

    def _direct_write(self, view: memoryview, offset: int, what: str) -> int:
        """How many bytes were written: all, unless direct writes are refused or end inside a page."""
        done = 0
        try:
            while done < view.nbytes and done % PAGE == 0 and self._alignment:
                done += write_some(self._direct, self.path, [view[done:]], offset + done, what, _REFUSALS)
        except OSError:
            self._alignment = 0
        return done


def whole_pages(offset: int, nbytes: int) -> tuple[int, int]:
    """First and last byte, of that many at an offset in the file, that make up whole pages."""
    return -offset % PAGE, (offset + nbytes) // PAGE * PAGE - offset


__all__ = ["DIRECT_BYTES", "NewFile", "whole_pages"]
