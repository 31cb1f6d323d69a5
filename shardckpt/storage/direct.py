"""System calls that speed up writes: direct writes, which bypass the page cache, and the allocation of space."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from shardckpt import settings
from shardckpt.tensors.memory import PAGE

if TYPE_CHECKING:
    from pathlib import Path

_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
#: Offset in struct statx of two numbers: the alignments of memory and of file offsets, since Linux 6.1.
_STATX_ALIGNMENTS = 152
#: f_type of ext2 to ext4, XFS, F2FS, Lustre: page alignment is right for these where statx reports no alignments.
_DIRECT_TYPES = {0xEF53, 0x58465342, 0xF2F52010, 0x0BD00BD0}


class DirectFile(NamedTuple):
    """A descriptor for direct writes, and the alignment in bytes that these need of memory addresses."""

    fd: int
    alignment: int


def open_direct(path: Path, fd: int) -> DirectFile | None:
    """Open a second descriptor of an open file, for direct writes.

    None where the file system has no direct writes, or gains nothing by direct writes (tmpfs, network file systems).
    """
    if not hasattr(os, "O_DIRECT") or not settings.direct_io():
        return None
    alignment = _read_alignment(fd)
    if not alignment:
        return None
    try:
        return DirectFile(os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW), alignment)
    except OSError:
        return None


def bypasses_cache(directory: Path) -> bool | None:
    """Return whether large writes to new files in a directory bypass the page cache.

    None if that is unknown: the file system has no files without a name (O_TMPFILE), by which this is tried.
    """
    if not settings.direct_io():
        return False
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except (AttributeError, OSError):
        return None
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)  # raises where open_direct's open does
        return _read_alignment(fd) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def count_parallel_files(directory: Path) -> int:
    """Return how many new files in a directory are best written in parallel.

    With direct writes, or where that is unknown, one: threads write to different parts of one file. Through the page
    cache, as many as there are threads: the kernel allows one cached write to a file at a time.
    """
    return settings.io_threads() if bypasses_cache(directory) is False else 1


def find_address(view: memoryview) -> int | None:
    """Return the memory address of a view; None if it is read-only, or empty."""
    if view.readonly or not view.nbytes:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def allocate(fd: int, size: int) -> bool:
    """Allocate space for a file of ``size`` bytes and extend it to that size; return False if that is not possible.

    os.posix_fallocate would not do: on a file system without the call, glibc writes to every block instead.
    """
    fallocate = _find_libc_function("fallocate")
    return fallocate is not None and fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0


def _read_alignment(fd: int) -> int:
    """Return the alignment in bytes that direct writes need of memory addresses; 0 if the file takes none."""
    found = ctypes.create_string_buffer(256)
    statx = _find_libc_function("statx")
    if statx is not None and statx(fd, b"", _AT_EMPTY_PATH, ctypes.c_uint(_STATX_DIOALIGN), found) == 0:
        (mask,) = struct.unpack_from("=I", found)
        memory, offset = struct.unpack_from("=II", found, _STATX_ALIGNMENTS)
        if mask & _STATX_DIOALIGN:
            # all our direct writes begin on pages, so an offset must not need a coarser alignment
            return int(memory) if memory and offset and PAGE % offset == 0 else 0
    return PAGE if _read_file_system_type(fd) in _DIRECT_TYPES else 0


def _read_file_system_type(fd: int) -> int:
    """Return the file system's f_type, one of the numbers that statfs(2) lists; 0 if the type is unknown."""
    found = ctypes.create_string_buffer(256)
    fstatfs = _find_libc_function("fstatfs")
    return int(ctypes.c_long.from_buffer(found).value) if fstatfs is not None and fstatfs(fd, found) == 0 else 0


def _find_libc_function(name: str) -> Any:
    """Return a function of the C library; None if the library lacks it, and on all systems but 64-bit Linux."""
    # other systems have other layouts of struct statx and struct statfs
    is_linux64 = sys.platform == "linux" and sys.maxsize > 1 << 32
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if is_linux64 else None
