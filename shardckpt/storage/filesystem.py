"""File system calls with whole results, never partial ones, and errors that name the file."""

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
from shardckpt.storage.abilities import on_store
from shardckpt.storage.directory import RelativePath

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from shardckpt.storage.remote import RemotePath

#: The only names that a checkpoint's files may have: no separators, so none leaves its directory.
FILE_NAME = re.compile(r"[A-Za-z0-9._-]{1,255}")

#: What passes by itself: signals, resources that are short for a moment, a server that does not answer at once.
TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
#: Seconds before each further attempt.
_PAUSES = (0.01, 0.05, 0.25, 1.0)

_T = TypeVar("_T")

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_REMOTE = -1  # stands for a descriptor where a store has the file
_VECTORS = 1024  # IOV_MAX on Linux
_LINK = (
    "cannot open {path}: it is a symbolic link, which is refused so that no file outside the checkpoint is read; where "
    "the links are meant (as in a Hugging Face cache), copy the directory with `cp -rL` and use the copy"
)


def check_file_name(name: str) -> str:
    """The name itself if it is safe inside a checkpoint, else :class:`CorruptCheckpointError`."""
    if not FILE_NAME.fullmatch(name) or name in (".", ".."):
        raise CorruptCheckpointError(
            f"file name {name!r} is not allowed in a checkpoint: only letters, digits, '.', '_' and '-'"
        )
    return name


@contextmanager
def naming(action: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError inside the block into a :class:`StorageError` that says what was done to which file."""
    try:
        yield
    except OSError as exc:
        code = errno.errorcode.get(exc.errno or 0, "OSError")
        raise StorageError(f"cannot {action} {path}: {exc.strerror or exc} ({code})") from exc


def open_new(path: Path) -> int:
    """A descriptor of a file that did not exist before."""
    with naming("create", path):
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def is_there(path: Path) -> bool:
    """Whether anything has the name, a link to nowhere too."""
    return path.exists() or path.is_symlink()


def file_size(path: Path) -> int:
    """Bytes of a file, or of a link itself; an OSError if it is not there."""
    remote = on_store(path)
    return path.lstat().st_size if remote is None else remote.size


def allocated_bytes(directory: Path) -> int:
    """Bytes that a directory of this machine takes on its disk with all that is in it, as ``du`` counts them."""
    with naming("look at", directory):
        found = {}
        for folder, _, names in os.walk(directory, onerror=_raise):
            for name in (".", *names):
                info = (Path(folder) / name).lstat()
                found[info.st_dev, info.st_ino] = info.st_blocks * 512
    return sum(found.values())


def open_existing(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file; links, devices and pipes are refused. :func:`close_file` closes it."""
    with naming("open", path):
        if (remote := on_store(path)) is not None:
            return _REMOTE, remote.size
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
    """What the system knows of a file that :func:`open_existing` has opened; None for one on a store."""
    return None if fd == _REMOTE else os.fstat(fd)


def same_file(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Whether two statuses may be of one file.

    Some file systems on a store number a file anew each time that it is opened: then the time of its writing tells.
    """
    if one is None or other is None:
        return one is other
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino) or one.st_mtime_ns == other.st_mtime_ns


def close_file(fd: int) -> None:
    """Close what :func:`open_existing` has opened."""
    if fd != _REMOTE:
        os.close(fd)


def patiently(call: Callable[..., _T], *args: Any) -> _T:
    """What the call returns; where it fails with one of ``TRANSIENT``, it is tried again a few times."""
    for pause in _PAUSES:
        try:
            return call(*args)
        except OSError as exc:
            if exc.errno not in TRANSIENT:
                raise
        time.sleep(pause)
    return call(*args)


def write_all(fd: int, path: Path, buffers: Sequence[memoryview], offset: int, what: str = "") -> None:
    """Write the buffers one after the other from ``offset`` on, however many calls it takes.

    Args:
        fd: Where to.
        path: Its file, named in errors.
        buffers: Bytes.
        offset: In the file.
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
    """One write of at least one byte; how many were written. Error numbers that are ``expected`` stay OSErrors."""
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
    """Fill the buffer from ``offset`` on; :class:`CorruptCheckpointError` if the file ends before."""
    left, remote = buffer, on_store(path)
    while left.nbytes:
        done = _read_some(fd, path, left, offset) if remote is None else _read_remote(remote, left, offset)
        if not done:
            raise CorruptCheckpointError(f"{path} ends at offset {offset}: {left.nbytes} bytes are missing")
        left, offset = left[done:], offset + done


def read_file(path: Path, limit: int) -> bytes:
    """The whole of a small regular file; a file above ``limit`` bytes is refused before memory is taken."""
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
    """Make the directory's entries durable."""
    with naming("sync the directory", path):
        _sync(path, os.O_DIRECTORY)


def sync_file(path: Path) -> None:
    """Make the bytes of a file durable that another call wrote."""
    with naming("fsync", path):
        _sync(path, os.O_NOFOLLOW)


def exchange(a: Path, b: Path) -> bool:
    """Swap two directory entries in one step; False where the system or file system has no such call."""
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
    """One read into the beginning of the buffer; how many bytes came, 0 at the file's end."""
    try:
        return patiently(os.preadv, fd, [buffer], offset)
    except OSError:
        with naming(f"read at offset {offset} of", path):
            raise


def _read_remote(path: RemotePath, buffer: memoryview, offset: int) -> int:
    """Fill the beginning of the buffer from a store; how many bytes came."""
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
    """What remains of the buffers behind their first ``count`` bytes."""
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
