"""System calls that speed up writes: direct writes, which bypass the page cache, and allocation of space."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from typing import TYPE_CHECKING, Any

from shardckpt import settings
from shardckpt.tensors.memory import PAGE

if TYPE_CHECKING:
    from pathlib import Path

_CLOSED = -1
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
#: Offset in struct statx of the alignments of memory and of file offsets, since Linux 6.1.
_STATX_ALIGNMENTS = 152
#: f_type of ext2 to ext4, XFS, F2FS, Lustre; used only where the kernel is too old to return alignments.
_DIRECT_TYPES = {0xEF53, 0x58465342, 0xF2F52010, 0x0BD00BD0}


def open_direct(path: Path, fd: int) -> tuple[int, int]:
    """Open a second descriptor of an open file, for direct writes; return it and the alignment of memory for them.

    The alignment is in bytes. Both are (-1, 0) where the file system has no direct writes, or gains nothing by them
    (tmpfs, network file systems).
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
    """Return whether large writes to new files in a directory bypass the page cache; None if that is unknown."""
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


def count_parallel_files(directory: Path) -> int:
    """Return how many new files in a directory are best written in parallel.

    With direct writes, one: threads write to different parts of it. Through the page cache, as many as there are
    threads: the kernel allows one cached write to a file at a time.
    """
    return settings.io_threads() if bypasses_cache(directory) is False else 1


def address(view: memoryview) -> int | None:
    """Return the memory address of a view; None if it is read-only, or empty."""
    if view.readonly or not view.nbytes:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def allocate(fd: int, size: int) -> bool:
    """Allocate space for a file of ``size`` bytes and extend it to that size; return False if that is not possible.

    (Not os.posix_fallocate: on a file system without the call, glibc writes to every block instead.)
    """
    fallocate = _libc_function("fallocate")
    return fallocate is not None and fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0


def _memory_alignment(fd: int) -> int:
    """Return the alignment in bytes that direct writes need of addresses; 0 for no direct writes."""
    found = ctypes.create_string_buffer(256)
    statx = _libc_function("statx")
    if statx is not None and statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), found) == 0:
        (mask,) = struct.unpack_from("=I", found)
        # writes begin on pages: a file system whose offsets must be multiples of more gets no direct ones
        memory, offset = struct.unpack_from("=II", found, _STATX_ALIGNMENTS)
        if mask & _STATX_DIOALIGN:
            return int(memory) if memory and offset and PAGE % offset == 0 else 0
    return PAGE if _file_system_type(fd) in _DIRECT_TYPES else 0


def _file_system_type(fd: int) -> int:
    """Return the file system's f_type, as statfs(2) lists them; 0 if it is unknown."""
    found = ctypes.create_string_buffer(256)
    fstatfs = _libc_function("fstatfs")
    return int(ctypes.c_long.from_buffer(found).value) if fstatfs is not None and fstatfs(fd, found) == 0 else 0


def _libc_function(name: str) -> Any:
    """Return a function of the C library; None if it has none, or if its structures are not those of 64-bit Linux."""
    is_linux64 = sys.platform == "linux" and sys.maxsize > 1 << 32
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if is_linux64 else None
