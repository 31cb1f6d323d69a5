"""File system calls that never end with partial results, and whose errors name the file."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.storage.abilities import has_local_files, on_store
from shardckpt.storage.directory import RelativePath

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from shardckpt.storage.remote import RemotePath

#: The only names that a checkpoint's files may have: without separators, so no name leads out of the directory.
FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")

#: Errors that pass without help: signals, a short lack of resources, a slow server.
TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
#: Seconds before each further attempt.
_PAUSES = (0.01, 0.05, 0.25, 1.0)

_T = TypeVar("_T")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_REMOTE = -1  # in place of a descriptor, for an object of a store
_VECTORS = 1024  # IOV_MAX on Linux
_LINK = (
    "cannot open {path}: it is a symbolic link, which is refused so that no file outside the checkpoint is read; where "
    "the links are meant (as in a Hugging Face cache), copy the directory with `cp -rL` and use the copy"
)


def check_file_name(name: str) -> str:
    """Return the name if a file of a checkpoint may have it.

    Raises:
        CorruptCheckpointError: it has other characters than letters, digits, ``.``, ``_`` and ``-``, or is a path.
    """
    if not FILE_NAME.fullmatch(name) or name in (".", ".."):
        raise CorruptCheckpointError(
            f"file name {name!r} is not allowed in a checkpoint: only letters, digits, '.', '_' and '-'"
        )
    return name


@contextmanager
def naming(action: str, path: Path | str) -> Iterator[None]:
    """Return a context manager that turns an OSError into a :class:`StorageError` with the action and the path.

    Example:
        >>> with naming("rename", path):  # doctest: +SKIP
        ...     os.rename(path, target)
        StorageError: cannot rename /checkpoints/step-10: Permission denied (EACCES)
    """
    try:
        yield
    except OSError as exc:
        code = errno.errorcode.get(exc.errno or 0, "OSError")
        raise StorageError(f"cannot {action} {path}: {exc.strerror or exc} ({code})") from exc


def open_new(path: Path) -> int:
    """Create a file for writing, and return its descriptor; the caller closes it.

    Raises:
        StorageError: the file exists (a save never writes into an existing file), or cannot be created.
    """
    with naming("create", path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def is_there(path: Path) -> bool:
    """Return whether anything has the name; a link without a target counts."""
    if isinstance(path, RelativePath) or not has_local_files(path):
        return path.exists() or path.is_symlink()
    return os.path.lexists(path)


def file_size(path: Path) -> int:
    """Return the size in bytes of a file, or of a link itself; raise an OSError if there is none."""
    remote = on_store(path)
    return path.lstat().st_size if remote is None else remote.size


def allocated_bytes(directory: Path) -> int:
    """Return the disk space in bytes of a local directory and its content, as ``du`` counts it: hard links once."""
    with naming("look at", directory):
        found = {}
        for folder, _, names in os.walk(directory, onerror=_raise):
            for name in (".", *names):
                info = (Path(folder) / name).lstat()
                found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def open_existing(path: Path) -> tuple[int, int]:
    """Open a regular file for reading.

    Args:
        path: The file; an object of a store is only looked up.

    Returns:
        The descriptor, for :func:`read_into` and :func:`close_file`, and the size in bytes.

    Raises:
        StorageError: the file cannot be opened, or is a symbolic link.
        CorruptCheckpointError: it is a directory, device or pipe.
    """
    with naming("open", path):
        if (remote := on_store(path)) is not None:
            return _REMOTE, remote.size
        # O_NONBLOCK, because to open a pipe without a writer would wait for one
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = path.open(flags) if isinstance(path, RelativePath) else os.open(path, flags)
        except OSError as exc:
            if exc.errno == errno.ELOOP and path.is_symlink():
                raise StorageError(_LINK.format(path=path)) from exc
            raise
        info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise CorruptCheckpointError(f"{path} is not a regular file")
    return fd, info.st_size


def status(fd: int) -> os.stat_result | None:
    """Return ``os.fstat`` of what :func:`open_existing` opened; None for an object of a store."""
    return None if fd == _REMOTE else os.fstat(fd)


def same_file(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Return whether two statuses may be of one file.

    Some file systems on a store give a file another inode number at each opening: then equal mtimes count.
    """
    if one is None or other is None:
        return one is other
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino) or one.st_mtime_ns == other.st_mtime_ns


def close_file(fd: int) -> None:
    """Close what :func:`open_existing` opened."""
    if fd != _REMOTE:
        os.close(fd)


def patiently(call: Callable[..., _T], *args: Any) -> _T:
    """Return what the call returns; after an error of ``TRANSIENT`` repeat the call a few times, with pauses."""
    for pause in _PAUSES:
        try:
            return call(*args)
        except OSError as exc:
            if exc.errno not in TRANSIENT:
                raise
        time.sleep(pause)
    return call(*args)


def write_all(fd: int, path: Path, buffers: Sequence[memoryview], offset: int, what: str = "") -> None:
    """Write all bytes of the buffers, one after the other, in as many calls as that takes.

    Args:
        fd: Of the file.
        path: The file, named in errors.
        buffers: The bytes.
        offset: Of the first byte in the file.
        what: What the bytes are (a key), named in errors.
    """
    left = [buffer for buffer in buffers if buffer.nbytes]
    while left:
        done = write_some(fd, path, left[:_VECTORS], offset, what)
        offset += done
        left = _drop(left, done)


def write_some(
    fd: int, path: Path, buffers: list[memoryview], offset: int, what: str = "", expected: Collection[int] = ()
) -> int:
    """Write at least one byte, and return the number written; errors with an ``expected`` number stay OSErrors."""
    what = f"{what} " * bool(what)
    try:
        done = patiently(os.pwritev, fd, buffers, offset)
    except OSError as exc:
        if exc.errno in expected:
            raise
        with naming(f"write {what}at offset {offset} of", path):
            raise
    if not done:
        raise StorageError(f"cannot write {what}at offset {offset} of {path}: nothing was written, without an error")
    return done


def read_into(fd: int, path: Path, buffer: memoryview, offset: int) -> None:
    """Fill the buffer with the file's bytes from ``offset`` on.

    Raises:
        CorruptCheckpointError: the file ends before.
        StorageError: a read failed.
    """
    left, remote = buffer, on_store(path)
    while left.nbytes:
        done = _read_some(fd, path, left, offset) if remote is None else _read_remote(remote, left, offset)
        if not done:
            raise CorruptCheckpointError(f"{path} ends at offset {offset}: {left.nbytes} bytes are missing")
        left, offset = left[done:], offset + done


def read_file(path: Path, limit: int) -> bytes:
    """Return all bytes of a small regular file.

    Raises:
        CorruptCheckpointError: it has more than ``limit`` bytes, which is checked before memory is allocated.
        StorageError: it cannot be read.
    """
    fd, size = open_existing(path)
    try:
        if size > limit:
            raise CorruptCheckpointError(f"{path} has {size} bytes, more than the {limit} that such a file may have")
        buffer = bytearray(size)
        read_into(fd, path, memoryview(buffer), 0)
    finally:
        close_file(fd)
    return bytes(buffer)


def sync_directory(path: Path) -> None:
    """Fsync a directory: the names in it survive a power cut after this."""
    with naming("sync the directory", path):
        _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Fsync a file that is closed: its bytes survive a power cut after this."""
    with naming("fsync", path):
        _sync(path, os.O_NOFOLLOW)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two directory entries in one step; return False if the system or file system has no such call."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    with naming(f"exchange {a} with", b):
        raise OSError(code, os.strerror(code))


def _raise(error: OSError) -> None:
    raise error


def _read_some(fd: int, path: Path, buffer: memoryview, offset: int) -> int:
    """Read once into the start of the buffer; return the number of bytes, 0 at the end of the file."""
    try:
        return patiently(os.preadv, fd, [buffer], offset)
    except OSError:
        with naming(f"read at offset {offset} of", path):
            raise


def _read_remote(path: RemotePath, buffer: memoryview, offset: int) -> int:
    """Fill the start of the buffer from a store; return the number of bytes."""
    found = path.read_range(offset, buffer.nbytes)
    if len(found) > buffer.nbytes:
        raise StorageError(f"{path}: asked for {buffer.nbytes} bytes at offset {offset}, its store gave {len(found)}")
    buffer[: len(found)] = found
    return len(found)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _drop(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first ``count`` bytes."""
    for number, buffer in enumerate(buffers):
        if count < buffer.nbytes:
            return [buffer[count:], *buffers[number + 1 :]]
        count -= buffer.nbytes
    return []


__all__ = [
    "FILE_NAME",
    "TRANSIENT",
    "allocated_bytes",
    "check_file_name",
    "close_file",
    "exchange",
    "file_size",
    "is_there",
    "naming",
    "open_existing",
    "open_new",
    "patiently",
    "read_file",
    "read_into",
    "same_file",
    "status",
    "sync_directory",
    "sync_file",
    "write_all",
    "write_some",
]
