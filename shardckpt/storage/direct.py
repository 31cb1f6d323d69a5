"""What a file system offers beyond plain writes: transfers that bypass the page cache, and space set aside."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import TYPE_CHECKING

from shardckpt import settings
from shardckpt.tensors import PAGE

if TYPE_CHECKING:
    from pathlib import Path

_CLOSED = -1
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
#: Where struct statx has the alignments of memory and of offsets, from Linux 6.1 on.
_STATX_ALIGNMENTS = 152
#: ext2 to ext4, XFS, F2FS, Lustre: asked for only where the kernel is too old to give alignments.
_DIRECT_KINDS = {0xEF53, 0x58465342, 0xF2F52010, 0x0BD00BD0}


def open_direct(path: Path, fd: int) -> tuple[int, int]:
    """A second descriptor of an open file, for direct writes, and what addresses must be multiples of for it.

    (-1, 0) where the file system has no direct writes, or none that are worth it (tmpfs, network file systems).
    """
    if not hasattr(os, "O_DIRECT") or not settings.direct_io():
        return _CLOSED, 0
    alignment = _memory_alignment(fd)
    if not alignment:
        return _CLOSED, 0
    try:
        return os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW), alignment
    except OSError:
        return _CLOSED, 0


def bypasses_cache(directory: Path) -> bool | None:
    """Whether large writes to new files in a directory go past the page cache; None where that cannot be asked."""
    if not settings.direct_io():
        return False
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):
        return None
    try:
        return _memory_alignment(fd) > 0
    finally:
        os.close(fd)


def side_by_side(directory: Path) -> int:
    """How many new files in a directory are best written at the same time.

    Past the page cache one is as good as several; through it the kernel lets one write at a time into a file.
    """
    return settings.io_threads() if bypasses_cache(directory) is False else 1


def address(view: memoryview) -> int | None:
    """Where a view's bytes are; None if it is read-only, or empty."""
    if view.readonly or not view.nbytes:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def allocate(fd: int, size: int) -> bool:
    """Set space aside for a file of ``size`` bytes and make it as long; False where that cannot be had.

    (Not os.posix_fallocate: where the file system has no such call, glibc writes into every block instead.)
    """
    fallocate = getattr(_libc(), "fallocate", None) if _is_linux64() else None
    return fallocate is not None and fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0


def _memory_alignment(fd: int) -> int:
    """What addresses of direct writes must be multiples of; 0 for no direct writes."""
    if not _is_linux64():
        return 0
    found = ctypes.create_string_buffer(256)
    statx = getattr(_libc(), "statx", None)
    if statx is not None and statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), found) == 0:
        (mask,) = struct.unpack_from("=I", found)
        memory, offset = struct.unpack_from("=II", found, _STATX_ALIGNMENTS)
        if mask & _STATX_DIOALIGN:
            return int(memory) if memory and offset and PAGE % offset == 0 else 0
    return PAGE if _kind(fd) in _DIRECT_KINDS else 0


def _kind(fd: int) -> int:
    """The number of the file system's kind, as statfs(2) lists them."""
    found = ctypes.create_string_buffer(256)
    return int(ctypes.c_long.from_buffer(found).value) if _libc().fstatfs(fd, found) == 0 else 0


def _is_linux64() -> bool:
    return sys.platform == "linux" and sys.maxsize > 1 << 32


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


__all__ = ["address", "allocate", "bypasses_cache", "open_direct", "side_by_side"]
