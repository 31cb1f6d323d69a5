"""A checkpoint's directory, held open: files that are opened through it are of one save, even during an overwrite.

A save that overwrites exchanges directories, and then removes the old one. A load that opens files by path could get
some of the old save and some of the new. Through the directory's descriptor it gets the old ones, or an error.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import sys
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from shardckpt.errors import CheckpointingException, CheckpointReplacedError
from shardckpt.storage.descriptors import open_within_limit
from shardckpt.storage.open_path import OpenPath

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path
    from types import TracebackType

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: O_PATH, because it needs no permission to list the directory; to open files in it by name needs none either.
_FLAGS = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
#: Seconds before each further attempt to read a checkpoint that is being replaced. The first follow at once: one of
#: them fits between two saves, even if these follow without a pause. The last pauses are long enough for a network file
#: system's client to drop stale entries from its cache.
_PAUSES = (*(0.0,) * 16, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
#: Errors of a path to nothing or of a loop of links: `exists` is then False, as in pathlib.
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP})
#: Errors of a directory that was removed; network file systems raise ESTALE.
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})
#: Whether :func:`retry_if_replaced` is in its second attempt or a later one; by context, since threads may load.
_again: ContextVar[bool] = ContextVar("_again", default=False)


class RelativePath(OpenPath):
    """An open directory, or a file in it, with the part of pathlib's interface that reading a checkpoint needs.

    Paths made from one another share one descriptor, which is closed with the last of them. The name ``""`` is the
    directory itself.
    """

    def __init__(self, directory: _OpenDirectory, name: str = "") -> None:
        self._directory = directory
        self._entry = name

    @property
    def path(self) -> Path:
        """The path by which the directory was opened, joined with the name."""
        return self._directory.path / self._entry

    @property
    def url(self) -> str:  # type: ignore[override]
        """The path as text."""
        return str(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._entry.rpartition("/")[2] or self._directory.path.name

    def open(self, flags: int) -> int:  # type: ignore[override]
        """Return a new descriptor of the file, opened with flags of ``os.open``; the caller closes it."""
        return open_within_limit(lambda: os.open(self._entry or ".", flags, dir_fd=self._directory.fd))

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Return the result of ``os.stat``."""
        return os.stat(self._entry or ".", dir_fd=self._directory.fd, follow_symlinks=follow_symlinks)

    def lstat(self) -> os.stat_result:
        """Return the result of ``os.lstat``."""
        return self.stat(follow_symlinks=False)

    def was_replaced(self) -> bool:
        """Return whether the path by which the directory was opened now leads to another directory, or to none."""
        try:
            return not os.path.samestat(self._directory.path.stat(), os.fstat(self._directory.fd))
        except OSError as exc:
            return exc.errno in _GONE

    def exists(self) -> bool:
        """Return whether the file exists; for a link, whether its target does."""
        return bool(self._mode())

    def is_dir(self) -> bool:
        """Return whether it is a directory, or a link to one."""
        return stat.S_ISDIR(self._mode())

    def is_file(self) -> bool:
        """Return whether it is a regular file, or a link to one."""
        return stat.S_ISREG(self._mode())

    def is_symlink(self) -> bool:
        """Return whether it is a symbolic link."""
        return stat.S_ISLNK(self._mode(follow_symlinks=False))

    def iterdir(self) -> Generator[RelativePath, None, None]:
        """Return an iterator of the paths in the directory, in no order."""
        # a descriptor of its own: listing needs read permission, which the one with O_PATH does not have
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
        return self.url

    def _mode(self, *, follow_symlinks: bool = True) -> int:
        """Return the file's type and permissions, as in ``st_mode``; 0 if it does not exist."""
        try:
            return self.stat(follow_symlinks=follow_symlinks).st_mode
        except OSError as exc:
            if exc.errno in _ABSENT:
                return 0
            raise


class _OpenDirectory:
    """A descriptor, closed with its last user."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    # No weakref.finalize: Python runs all of them at exit, and fails if a thread adds one meanwhile. The thread that
    # removes old checkpoints would.
    def __del__(self) -> None:
        if not sys.is_finalizing():  # at the exit of a forked child the number may be another file's
            os.close(self.fd)


def open_directory(path: Path) -> Path:
    """Hold a directory open, so that everything that is read through the result is of one save.

    Args:
        path: A checkpoint: a directory, or a folder on a store.

    Returns:
        A :class:`RelativePath` of a local directory; a folder on a store with a fresh listing, which in a first attempt
        is the one that came with the path; any other path unchanged, because the code that reads it reports its fault.
    """
    if isinstance(path, OpenPath):
        return path.refresh() if is_read_again() else path.hold()
    try:
        return RelativePath(_OpenDirectory(path, open_within_limit(lambda: os.open(path, _FLAGS))))
    except OSError:
        return path


def refresh_listing(path: Path) -> Path:
    """Return the folder on a store without its cached listing; a directory, which has none, unchanged."""
    return path.refresh() if isinstance(path, OpenPath) else path


def real_path(path: Path) -> Path:
    """Return the path by which an open directory was opened; any other path unchanged."""
    return path.path if isinstance(path, RelativePath) else path


def was_replaced(path: Path) -> bool:
    """Return whether the path is of a directory held open that has since been replaced or removed."""
    return isinstance(path, RelativePath) and path.was_replaced()


def replaced_error(path: Path, why: object) -> CheckpointReplacedError:
    """Return the error for an open checkpoint that was replaced; ``why`` is the failure that showed it."""
    return CheckpointReplacedError(
        f"{path}: since it was opened, another save has replaced it, or it was removed, and its old files are gone: "
        f"open it again ({why})"
    )


class detect_replacement:  # noqa: N801 - used as a function; no generator, since each opening of a file has one
    """A context manager that turns an error of the block into CheckpointReplacedError if the checkpoint was replaced.

    Files that an overwrite has removed look damaged or missing: this gives the true reason, so that a caller can retry.
    ``replaced`` returns whether it was replaced, by default :func:`was_replaced` of the path.
    """

    __slots__ = ("_path", "_replaced")

    def __init__(self, path: Path, replaced: Callable[[], bool] | None = None) -> None:
        self._path = path
        self._replaced = replaced

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, (CheckpointingException, OSError)) or isinstance(error, CheckpointReplacedError):
            return
        try:
            is_gone = was_replaced(self._path) if self._replaced is None else self._replaced()
        except CheckpointingException:
            is_gone = False  # the store does not answer: the error inside the block says more
        if is_gone:
            raise replaced_error(self._path, error) from error


def retry_if_replaced(attempt: Callable[[], _T], path: object) -> _T:
    """Call a function that reads a checkpoint, and repeat the call while another save replaces the checkpoint.

    It is collective if ``attempt`` is: all ranks get the same error from that, and so all retry.

    Args:
        attempt: Opens the checkpoint, and returns its result; called once or more.
        path: The checkpoint, named in errors.

    Returns:
        The result of ``attempt``.

    Raises:
        CheckpointReplacedError: the checkpoint was replaced during every attempt.
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
            logger.info("reading %s once more: %s", path, exc)
        finally:
            _again.reset(before)
        time.sleep(pause)
        is_again = True


def is_read_again() -> bool:
    """Return whether :func:`retry_if_replaced` is in a retry: the next save may replace the checkpoint soon, too."""
    return _again.get()
