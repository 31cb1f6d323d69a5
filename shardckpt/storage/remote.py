"""Checkpoints on stores that have URLs: what a plugin gives for one, and a path that reads like a local one."""

from __future__ import annotations

import errno
import functools
import logging
import os
import random
import re
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from shardckpt import settings
from shardckpt.errors import CheckpointingException, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    _Base = Path  # whatever takes a Path to read a checkpoint takes a RemotePath, and finds there what it uses
else:
    _Base = object

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Errors that another attempt does not mend.
_PERMANENT = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    NotImplementedError,
    ValueError,
)
_FIRST_DELAY = 0.25  # seconds; each further one is twice as long
_LONGEST_DELAY = 8.0
_PASSWORD = re.compile(r"(?<=://)([^/:@]*):[^/@]*@")


class RemoteFolder(Protocol):
    """What a plugin's ``shardckpt_filesystem`` gives for a URL: the objects directly below it.

    The methods are called from several threads at a time and raise whatever the store raises: ``FileNotFoundError``
    for an object that is not there, other errors are tried again.

    Attributes:
        url: The URL, without a slash at its end.
    """

    url: str

    def files(self) -> dict[str, int]:
        """Bytes of each object by name, as the store has them now; none for a URL that does not exist."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """A range of an object: no more than that travels; fewer bytes where the object ends before."""

    def upload(self, name: str, path: Path) -> None:
        """Make a local file the object of that name, which appears whole or not at all."""

    def delete(self, name: str) -> None:
        """Remove an object."""


@runtime_checkable
class ListsFolders(Protocol):
    """A :class:`RemoteFolder` that also knows the folders directly below it; whoever looks for checkpoints needs it."""

    def folders(self) -> list[str]:
        """Names of the folders directly below, as the store has them now; none for a URL that does not exist."""

    def remove_folder(self, name: str) -> None:
        """Remove a folder in which no objects are left, on stores where it is there without any; else do nothing."""


class RemotePath(_Base):
    """A URL's folder, or an object in it, with those of pathlib's abilities that reading a checkpoint takes.

    The folder is listed once, when that is first needed, for all paths that are made from one another.

    Args:
        folder: What the plugin gave.
    """

    #: Abilities, as :mod:`shardckpt.storage.abilities` asks for them.
    can_rename = False
    has_local_files = False

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder
        self._name = ""
        self._listing = _Listing(folder)

    @property
    def url(self) -> str:
        """What opens it again, in another process too."""
        return f"{self.folder.url}/{self._name}" if self._name else self.folder.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self._name or self.folder.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name's, as pathlib has it."""
        return PurePosixPath(self.name).suffix

    @property
    def size(self) -> int:
        """Bytes of the object; an OSError if there is none."""
        if self._name not in self._listing.sizes:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return self._listing.sizes[self._name]

    def is_dir(self) -> bool:
        """Whether it is a folder that holds any object."""
        return not self._name and bool(self._listing.sizes)

    def is_file(self) -> bool:
        """Whether it is an object."""
        return self._name in self._listing.sizes

    def is_symlink(self) -> bool:
        """Never: stores have no links."""
        return False

    def exists(self) -> bool:
        """Whether the store has it."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """The objects in the folder."""
        for name in self._listing.sizes:
            yield self / name

    def read_range(self, offset: int, nbytes: int) -> bytes:
        """Bytes of the object from ``offset`` on: fewer where it ends before."""
        return attempt(f"read at offset {offset} of", self, lambda: self.folder.read(self._name, offset, nbytes))

    def __truediv__(self, name: str | os.PathLike[str]) -> RemotePath:
        path = RemotePath(self.folder)
        path._name = f"{self._name}/{os.fspath(name)}" if self._name else os.fspath(name)
        path._listing = self._listing
        return path

    def __str__(self) -> str:
        return masked(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)


class _Listing:
    """The objects of a folder, asked for once."""

    def __init__(self, folder: RemoteFolder) -> None:
        self._folder = folder

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return attempt("list", RemotePath(self._folder), self._folder.files)


def masked(url: str) -> str:
    """The URL as it may be shown: ``ftp://user:password@host`` without the password."""
    return _PASSWORD.sub(r"\1:***@", url)


def attempt(action: str, path: RemotePath, call: Callable[[], _T]) -> _T:
    """The call's result, at the first of ``SHARDCKPT_REMOTE_ATTEMPTS`` attempts that has one.

    Args:
        action: What it does, for errors: "upload".
        path: To what.
        call: Talks to the store.

    Raises:
        StorageError: names the path and the store's last error.
    """
    attempts = settings.remote_attempts()
    number = 1
    while True:
        try:
            return call()
        except CheckpointingException:
            raise
        except Exception as exc:  # stores raise errors of many kinds
            shown = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
            if isinstance(exc, _PERMANENT) or number >= attempts:
                times = "" if number == 1 else f" in {number} attempts"
                raise StorageError(f"cannot {action} {path}{times}: {shown}") from exc
            logger.warning("cannot %s %s, attempt %d of %d: %s", action, path, number, attempts, shown)
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (number - 1))
        time.sleep(delay * random.uniform(0.5, 1))  # noqa: S311 - so that a thousand ranks do not come back at once
        number += 1


__all__ = ["ListsFolders", "RemoteFolder", "RemotePath", "attempt", "masked"]
