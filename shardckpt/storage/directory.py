"""A checkpoint's directory, held open: what is read through it is of one save, whatever takes its place meanwhile.

A save that overwrites exchanges directories, and then removes the old one. By its path a load would open some files of
the one and some of the other.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
import weakref
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypeVar

from shardckpt.errors import CheckpointingException, CheckpointReplacedError
from shardckpt.storage.abilities import on_store
from shardckpt.storage.remote import RemotePath

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    _Base = Path  # whatever takes a Path to read a checkpoint takes a RelativePath, and finds there what it uses
else:
    _Base = object

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: O_PATH needs no permission to list the directory: to read files of known names, none is needed.
_FLAGS = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
#: Seconds before each further attempt to read what is being replaced. The first are without: of saves that follow each
#: other at once the next attempt meets another, or none. The last let a network file system forget what it has cached.
_PAUSES = (*(0.0,) * 16, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
#: As pathlib: of a path that leads nowhere, and of one that leads round in a circle.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})
#: Of a directory that is there no longer, on a network file system too.
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
#: Whether :func:`retry_if_replaced` is in a further attempt.
_again: ContextVar[bool] = ContextVar("_again", default=False)


class RelativePath(_Base):
    """An open directory, or a file in it, with those of pathlib's abilities that reading a checkpoint takes.

    The directory is closed with the last of the paths that are made from one another.

    Args:
        directory: The open directory.
        name: Of a file in it; ``""`` is the directory itself.
    """

    def __init__(self, directory: _OpenDirectory, name: str = "") -> None:
        self._directory = directory
        self._entry = name

    @property
    def path(self) -> Path:
        """The path by which the directory was opened, and the file in it."""
        return self._directory.path / self._entry

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._entry.rpartition("/")[2] or self._directory.path.name

    @property
    def suffix(self) -> str:
        """The name's, as pathlib has it."""
        return PurePosixPath(self._entry).suffix

    def open(self, flags: int) -> int:  # type: ignore[override]
        """A descriptor of the file, by flags of ``os.open``."""
        return os.open(self._entry or ".", flags, dir_fd=self._directory.fd)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As ``os.stat``."""
        return os.stat(self._entry or ".", dir_fd=self._directory.fd, follow_symlinks=follow_symlinks)

    def lstat(self) -> os.stat_result:
        """As ``os.lstat``."""
        return self.stat(follow_symlinks=False)

    def was_replaced(self) -> bool:
        """Whether the directory's path leads to another directory now, or nowhere."""
        try:
            return not os.path.samestat(self._directory.path.stat(), os.fstat(self._directory.fd))
        except OSError as exc:
            return exc.errno in _GONE

    def exists(self) -> bool:
        """Whether it is there, or what it is a link to."""
        return self._mode() is not None

    def is_dir(self) -> bool:
        """Whether it is a directory, or a link to one."""
        mode = self._mode()
        return mode is not None and stat.S_ISDIR(mode)

    def is_file(self) -> bool:
        """Whether it is a regular file, or a link to one."""
        mode = self._mode()
        return mode is not None and stat.S_ISREG(mode)

    def is_symlink(self) -> bool:
        """Whether it is a symbolic link."""
        mode = self._mode(follow_symlinks=False)
        return mode is not None and stat.S_ISLNK(mode)

    def iterdir(self) -> Generator[RelativePath, None, None]:
        """What is in the directory."""
        fd = self.open(os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            names = os.listdir(fd)  # noqa: PTH208 - of a descriptor, not of a path
        finally:
            os.close(fd)
        for name in names:
            yield self / name

    def __truediv__(self, name: str | os.PathLike[str]) -> RelativePath:
        name = os.fspath(name)
        return RelativePath(self._directory, f"{self._entry}/{name}" if self._entry else name)

    def __str__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"RelativePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RelativePath) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def _mode(self, *, follow_symlinks: bool = True) -> int | None:
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except OSError as exc:
            if exc.errno in _ABSENT:
                return None
            raise


class _OpenDirectory:
    """A descriptor, closed with its last user."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd
        # not at exit: in a forked child the number may be another file's by then
        weakref.finalize(self, os.close, fd).atexit = False


def open_directory(path: Path) -> Path:
    """The directory held open; a path to anything else as it is, for who reads it says what is wrong with it.

    A folder on a store is listed anew.
    """
    if (remote := on_store(path)) is not None:
        return listed_anew(remote)
    if isinstance(path, RelativePath):
        return path
    try:
        return RelativePath(_OpenDirectory(path, os.open(path, _FLAGS)))
    except OSError:
        return path


def listed_anew(path: RemotePath) -> RemotePath:
    """The folder on a store, as it is when it is looked at next."""
    return RemotePath(path.folder)


def real_path(path: Path) -> Path:
    """The path by which a directory was opened; any other as it is."""
    return path.path if isinstance(path, RelativePath) else path


def was_replaced(path: Path) -> bool:
    """Whether the path is of a directory that is held open, and another stands in its place, or none."""
    return isinstance(path, RelativePath) and path.was_replaced()


def replaced_error(path: Path, why: object) -> CheckpointReplacedError:
    """What to raise where an open checkpoint is gone; ``why`` is what has failed."""
    return CheckpointReplacedError(
        f"{path}: another save has replaced it, or it was removed, since it was opened, and what was opened is gone: "
        f"open it again ({why})"
    )


@contextmanager
def detect_replacement(path: Path, replaced: Callable[[], bool] | None = None) -> Iterator[None]:
    """Raise CheckpointReplacedError in the place of an error inside the block, if the checkpoint was replaced.

    Args:
        path: The checkpoint.
        replaced: Tells whether it was; by default :func:`was_replaced` of the path.

    Raises:
        CheckpointReplacedError: it was.
    """
    try:
        yield
    except CheckpointReplacedError:
        raise
    except (CheckpointingException, OSError) as exc:
        if _is_so(replaced or (lambda: was_replaced(path))):
            raise replaced_error(path, exc) from exc
        raise


def _is_so(replaced: Callable[[], bool]) -> bool:
    try:
        return replaced()
    except CheckpointingException:  # a store does not answer: the error that was there before says more
        return False


def retry_if_replaced(attempt: Callable[[], _T], path: object) -> _T:
    """Call a function that reads a checkpoint, and call it again each time that another save replaced it meanwhile.

    Collective where ``attempt`` is: all ranks then raise the same error, and so all begin again.

    Args:
        attempt: Opens the checkpoint, and returns what it has read.
        path: The checkpoint, named in errors.

    Returns:
        What ``attempt`` returns.

    Raises:
        CheckpointReplacedError: it was replaced in every one of the attempts.
    """
    pauses = iter(_PAUSES)
    is_again = False
    while True:
        before = _again.set(is_again)
        try:
            return attempt()
        except CheckpointReplacedError as exc:
            pause = next(pauses, None)
            if pause is None:
                raise CheckpointReplacedError(
                    f"{path} is being overwritten: in each of {len(_PAUSES) + 1} attempts to read it, another save "
                    "replaced it meanwhile; load it when that has ended, or save to a directory for each step. The "
                    f"last attempt: {exc}"
                ) from exc
            logger.info("%s is read again: %s", path, exc)
        finally:
            _again.reset(before)
        time.sleep(pause)
        is_again = True


def is_read_again() -> bool:
    """Whether a checkpoint is read once more, because it was replaced meanwhile: it may be again soon."""
    return _again.get()


__all__ = [
    "RelativePath",
    "detect_replacement",
    "is_read_again",
    "listed_anew",
    "open_directory",
    "real_path",
    "replaced_error",
    "retry_if_replaced",
    "was_replaced",
]
