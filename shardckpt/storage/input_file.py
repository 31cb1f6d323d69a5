"""Files that exist, open for reading: one of this machine, or an object of a store."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.storage.abilities import on_store
from shardckpt.storage.descriptors import open_within_limit
from shardckpt.storage.directory import RelativePath
from shardckpt.storage.filesystem import LINK_REFUSAL, retry_transient, wrap_os_errors

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from typing_extensions import Self

    from shardckpt.storage.remote import RemotePath


class InputFile(ABC):
    """A file that is open for reading, by several threads at a time; a context manager that closes it.

    ``size``, in bytes, and ``status``, the result of ``os.fstat``, are from when it was opened; ``status`` is None for
    an object of a store.
    """

    path: Path
    size: int
    status: os.stat_result | None

    def fileno(self) -> int:
        """Return the descriptor, as a file of :mod:`io` does: an ``io.UnsupportedOperation`` where there is none."""
        raise io.UnsupportedOperation(f"{self.path} is an object of a store")

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the file's bytes from ``offset`` on; CorruptCheckpointError if the file ends before."""
        while buffer.nbytes:  # once, as a rule
            done = self._read_some(buffer, offset)
            if not done:
                raise CorruptCheckpointError(f"{self.path} ends at offset {offset}: {buffer.nbytes} bytes are missing")
            buffer, offset = buffer[done:], offset + done

    @abstractmethod
    def _read_some(self, buffer: memoryview, offset: int) -> int:
        """Fill the start of the buffer, and return how much of it; 0 is the end of the file."""

    def close(self) -> None:  # noqa: B027 - of an object nothing is open
        """Close it; the caller does so once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalFile(InputFile):
    """A regular file of this machine.

    A symbolic link is a StorageError, a directory, device or pipe a CorruptCheckpointError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # O_NONBLOCK, because to open a pipe without a writer would wait for one
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with wrap_os_errors("open", path):
            try:
                if isinstance(path, RelativePath):
                    self._fd = path.open(flags)
                else:
                    self._fd = open_within_limit(lambda: os.open(path, flags))
            except OSError as exc:
                if exc.errno == errno.ELOOP and path.is_symlink():
                    raise StorageError(LINK_REFUSAL.format(path=path)) from exc
                raise
            self.status: os.stat_result | None = os.fstat(self._fd)
        if not stat.S_ISREG(self.status.st_mode):
            self.close()
            raise CorruptCheckpointError(f"{path} is not a regular file")
        self.size = self.status.st_size

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        try:
            return retry_transient(os.preadv, self._fd, [buffer], offset)
        except OSError:
            with wrap_os_errors(f"read at offset {offset} of", self.path):
                raise

    def close(self) -> None:
        """Close the descriptor; an error of that says nothing about the bytes that were read."""
        with contextlib.suppress(OSError):
            os.close(self._fd)


class StoredObject(InputFile):
    """An object of a store, which is only looked up: each read is a request."""

    def __init__(self, path: RemotePath) -> None:
        self.path = path
        self.status = None
        self._remote = path
        with wrap_os_errors("open", path):
            self.size = path.size

    def _read_some(self, buffer: memoryview, offset: int) -> int:
        return self._remote.read_into(buffer, offset)


def open_existing(path: Path) -> InputFile:
    """Open a regular file, or an object of a store, for reading.

    A symbolic link is a StorageError, a directory, device or pipe a CorruptCheckpointError.
    """
    return LocalFile(path) if (remote := on_store(path)) is None else StoredObject(remote)


def read_joined(file: InputFile, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill several buffers, one after the other, with the bytes of a local file; one call does it, as a rule.

    If the file ends before, it is a CorruptCheckpointError.
    """
    try:
        done = retry_transient(os.preadv, file.fileno(), buffers, offset)
    except OSError:
        with wrap_os_errors(f"read at offset {offset} of", file.path):
            raise
    if done == sum(buffer.nbytes for buffer in buffers):
        return
    for buffer in buffers:
        filled = max(0, min(done, buffer.nbytes))
        file.read_into(buffer[filled:], offset + filled)
        offset, done = offset + buffer.nbytes, done - buffer.nbytes


def read_file(path: Path, limit: int) -> bytes:
    """Return all bytes of a small regular file.

    More than ``limit`` bytes are a CorruptCheckpointError, before memory is allocated.
    """
    with open_existing(path) as file:
        if file.size > limit:
            raise CorruptCheckpointError(
                f"{path} has {file.size} bytes, more than the {limit} that such a file may have"
            )
        return read_all(file)


def read_all(file: InputFile) -> bytes:
    """Return all bytes of a file."""
    buffer = bytearray(file.size)
    file.read_into(memoryview(buffer), 0)
    return bytes(buffer)


def may_be_same(one: os.stat_result | None, other: os.stat_result | None) -> bool:
    """Return whether two statuses may be of one file.

    Some file systems on a store give a file another inode number at each opening: then equal mtimes count.
    """
    if one is None or other is None:
        return one is other
    return (one.st_dev, one.st_ino) == (other.st_dev, other.st_ino) or one.st_mtime_ns == other.st_mtime_ns
