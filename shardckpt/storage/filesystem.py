"""File system calls that never end with partial results, and whose errors name the file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shardckpt.errors import CorruptCheckpointError, NotEnoughSpaceError, StorageError, is_first_warning, name_known
from shardckpt.manifest.names import NAME_RULE, is_file_name, list_parents
from shardckpt.storage.abilities import on_store
from shardckpt.storage.descriptors import open_within_limit

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import TracebackType


#: Errors that pass without help: signals, a short lack of resources, a slow server.
TRANSIENT = frozenset({errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT})
#: Seconds before each further attempt.
_PAUSES = (0.01, 0.05, 0.25, 1.0)

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

LINK_REFUSAL = (
    "cannot open {path}: it is a symbolic link, which is refused so that no file outside the checkpoint is read; where "
    "the links are meant (as in a Hugging Face cache), copy the directory with `cp -rL` and use the copy"
)


def check_file_name(name: str) -> str:
    """Return a name that a checkpoint gives, if one of its files may have it: no such path leads out of its directory.

    Raises:
        CorruptCheckpointError: it is against :data:`shardckpt.manifest.NAME_RULE`.
    """
    if not is_file_name(name):
        raise CorruptCheckpointError(f"file name {name!r:.300} is not allowed in a checkpoint: {NAME_RULE}")
    return name


def check_foreign_name(name: str) -> str:
    """Return the relative path of a file that another library wrote, if it cannot lead out of the directory.

    Other libraries name files and folders after keys, so any characters may be in it. A name that is absolute, or has
    empty parts, ``.``, ``..`` or a null character, is a CorruptCheckpointError.
    """
    if "\0" in name or not {"", ".", ".."}.isdisjoint(name.split("/")):
        raise CorruptCheckpointError(f"file name {name!r:.300} is not allowed in a checkpoint: it may lead out of it")
    return name


def refuse_linked_folders(directory: Path, name: str) -> None:
    """Raise StorageError if a folder on the way from a directory to a file in it is a symbolic link."""
    for inner in list_parents(name):
        folder = directory / inner
        if folder.is_symlink():
            raise StorageError(LINK_REFUSAL.format(path=folder)) from OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def make_folders(directory: Path, name: str) -> None:
    """Create the folders on the way from a staging directory to a file in it; other ranks may do so at a time.

    They are durable only after :func:`sync_tree`. What has the name of a folder and is none is a StorageError, and so
    is a link to a folder.
    """
    for inner in list_parents(name):
        folder = directory / inner
        with wrap_os_errors("create the folder", folder):
            try:
                folder.mkdir()
            except FileExistsError:
                # lstat: a link is no folder, since files would be written outside of the directory
                if not stat.S_ISDIR(folder.lstat().st_mode):
                    raise


#: Advice that an error of the system lacks.
_ADVICE = {
    errno.EFBIG: ": `ulimit -f` says how large a file of the process may be; else the file system has no larger",
    errno.EMFILE: ": `ulimit -n` says how many the process may have, pipes and sockets among them; raise it",
}


class wrap_os_errors:  # noqa: N801 - used as a function; no generator, since each opening of a file has one
    """A context manager that turns an OSError into a :class:`StorageError` with the action and the path.

    For the action "rename" it says, for example, "cannot rename /checkpoints/step-10: Permission denied (EACCES)".
    """

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: Path | str) -> None:
        self._action = action
        self._path = path

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, OSError):
            code = errno.errorcode.get(error.errno or 0, "OSError")
            kind = NotEnoughSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else StorageError
            advice = _ADVICE.get(error.errno or 0, "")
            raise kind(f"cannot {self._action} {self._path}: {error.strerror or error} ({code}){advice}") from error


def open_new(path: Path, *, shared: bool = False) -> int:
    """Create a file for writing, and return its descriptor; the caller closes it.

    A file that exists is a StorageError, since a save never writes into one; ``shared``: another rank of the same save
    may have created it.
    """
    with wrap_os_errors("create", path):
        # O_EXCL: a path that exists may be a link to elsewhere, or another save's file; 0o666 is cut by the umask
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        return open_within_limit(lambda: os.open(path, flags if shared else flags | os.O_EXCL, 0o666))


def is_there(path: Path) -> bool:
    """Return whether anything has the name; a link without a target counts.

    It is a StorageError if the system does not say: what cannot be looked at may be there.
    """
    if on_store(path) is not None:
        return path.exists()
    with wrap_os_errors("access", path):
        try:
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def file_size(path: Path) -> int:
    """Return the size in bytes of a file, or of a link itself; raise an OSError if there is none."""
    remote = on_store(path)
    return path.lstat().st_size if remote is None else remote.size


def find_size(path: Path) -> int:
    """Return the size in bytes of a file; 0 if it is missing, which whoever reads it says."""
    try:
        return file_size(path)
    except OSError:
        return 0


def name_siblings(path: Path) -> str:
    """Return, for an error that nothing is at a local path, the nearest name in its folder, and the first others."""
    try:
        siblings = [each.name for each in path.parent.iterdir() if not each.name.startswith(".")]
    except OSError:
        return ""
    return name_known(path.name, siblings, f"in {path.parent}")


def retry_transient(call: Callable[..., _T], *args: Any) -> _T:
    """Return the result of the call; after an error of ``TRANSIENT`` repeat the call a few times, with pauses."""
    for pause in _PAUSES:
        try:
            return call(*args)
        except OSError as exc:
            if exc.errno not in TRANSIENT:
                raise
        time.sleep(pause)
    return call(*args)


def write_all(fd: int, path: Path, view: memoryview, offset: int, what: str = "") -> None:
    """Write all bytes of the view at an offset, in as many calls as that takes; errors name the path and ``what``."""
    while view.nbytes:
        done = write_some(fd, path, view, offset, what)
        view, offset = view[done:], offset + done


def write_some(
    fd: int, path: Path, view: memoryview, offset: int, what: str = "", expected: Collection[int] = ()
) -> int:
    """Write at least one byte, and return the number written; errors with an ``expected`` number stay OSErrors."""
    what = f"{what} " * bool(what)
    try:
        done = retry_transient(os.pwritev, fd, [view], offset)
    except OSError as exc:
        if exc.errno in expected:
            raise
        with wrap_os_errors(f"write {what}at offset {offset} of", path):
            raise
    if not done:
        raise StorageError(f"cannot write {what}at offset {offset} of {path}: nothing was written, without an error")
    return done


def put_file(path: Path, data: bytes, temporary: str, *, makes_folder: bool = False) -> None:
    """Write a small file, or an object of a store, in one step: who reads it sees the old bytes or the new ones.

    A file of the name ``temporary`` in the same directory is written first, and stays if the process is killed; no
    other process or thread may use it. A store needs none. If the directory is missing, ``makes_folder`` makes it; else
    it is a FileNotFoundError, which callers expect, where all other errors are a StorageError.
    """
    if (remote := on_store(path)) is not None:
        remote.write(data)
        return
    if makes_folder:
        # mkdir(exist_ok=True) would raise where the directory is removed between the call and its second look
        with wrap_os_errors("make", path.parent), contextlib.suppress(FileExistsError):
            path.parent.mkdir()
    written = path.with_name(temporary)
    try:
        with written.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except FileNotFoundError:
        raise
    except OSError:
        with contextlib.suppress(OSError):  # the error that is told is the first one
            written.unlink()
        with wrap_os_errors("write", path):
            raise
    sync_directory(path.parent)
    if makes_folder:  # also where another process has made it, which may not have synced it yet
        sync_directory(path.parent.parent)


def sync_directory(path: Path) -> None:
    """Fsync a directory: the names in it survive a power cut after this, if its file system can do that."""
    with wrap_os_errors("sync the directory", path):
        try:
            _sync(path, os.O_DIRECTORY)
        except OSError as exc:
            if exc.errno != errno.EINVAL:
                raise
            _warn_of_unsynced(path)


def _warn_of_unsynced(path: Path) -> None:
    """Log once that directories are not fsynced: SMB before Linux 5.12 and VirtualBox's shared folders cannot."""
    if is_first_warning(__name__):
        logger.warning("the file system of %s cannot fsync directories: a power cut may undo the last renames", path)


def sync_tree(path: Path) -> None:
    """Fsync a directory and all folders in it, the innermost first: the names in them survive a power cut after this.

    Links to folders are not followed.
    """

    def fail(error: OSError) -> None:
        raise error

    with wrap_os_errors("list", path):
        for folder, _, _ in os.walk(path, topdown=False, onerror=fail):
            sync_directory(Path(folder))


def sync_file(path: Path) -> None:
    """Fsync a file that is closed: its bytes survive a power cut after this."""
    with wrap_os_errors("fsync", path):
        _sync(path, os.O_NOFOLLOW)


def _sync(path: Path, flags: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
