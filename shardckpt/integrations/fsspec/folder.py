"""A URL's folder through fsspec; credentials and endpoints are what fsspec's own configuration says."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]

from shardckpt.errors import StorageError
from shardckpt.storage import masked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FsspecFolder:
    """The objects directly below a URL.

    Args:
        url: The URL, without a slash at its end.
        filesystem: fsspec's, for this protocol.
        root: What the filesystem calls the folder.
    """

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root

    def files(self) -> dict[str, int]:
        """Bytes by name, as the store has them now."""
        found = {}
        for name, entry in self._entries("file"):
            found[name] = int(self._filesystem.size(entry["name"]) if entry["size"] is None else entry["size"])
        return found

    def folders(self) -> list[str]:
        """Names of the folders directly below, as the store has them now."""
        return [name for name, _ in self._entries("directory")]

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder where the store keeps such; one that is not empty stays."""
        with suppress(OSError, NotImplementedError):  # on most stores there is nothing to remove
            if not self._filesystem.ls(self._path(name)):  # some remove all that is in it
                self._filesystem.rmdir(self._path(name))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """A range of an object."""
        return bytes(self._filesystem.cat_file(self._path(name), start=offset, end=offset + nbytes))

    def upload(self, name: str, path: Path) -> None:
        """Make a local file an object, and a folder for it on stores that ask for one; never a bucket."""
        try:
            self._filesystem.put_file(str(path), self._path(name))
        except FileNotFoundError:
            if not self._filesystem.exists(re.match("/*[^/]*", self._root)[0]):  # type: ignore[index]
                raise
            self._filesystem.makedirs(self._root, exist_ok=True)
            self._filesystem.put_file(str(path), self._path(name))

    def delete(self, name: str) -> None:
        """Remove an object."""
        self._filesystem.rm_file(self._path(name))

    def _entries(self, kind: str) -> Iterator[tuple[str, Any]]:
        """What is directly below the URL, by name."""
        self._filesystem.invalidate_cache()
        try:
            entries = self._filesystem.ls(self._root, detail=True)
        except FileNotFoundError as exc:
            if not self._filesystem.exists(self._root):
                return
            # A filesystem of directories looks at one entry after the other, and one of them has gone meanwhile.
            raise OSError(errno.EAGAIN, "the folder changed while it was listed") from exc
        for entry in entries:
            path = entry["name"].rstrip("/") if entry["type"] == "directory" else entry["name"]
            folder, _, name = path.rpartition("/")
            if entry["type"] == kind and name and folder.strip("/") == self._root.strip("/"):
                yield name, entry

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def open_folder(url: str) -> FsspecFolder | None:
    """The folder; None if fsspec does not know the protocol (``outer::inner://`` has two).

    Raises:
        StorageError: fsspec knows the protocol, and what it needs for it is not installed.
    """
    if not all(_knows(protocol, url) for protocol in url.partition("://")[0].split("::")):
        return None
    filesystem, root = fsspec.core.url_to_fs(url)
    return FsspecFolder(url, filesystem, root)


def _knows(protocol: str, url: str) -> bool:
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        return False
    except ImportError as exc:
        raise StorageError(f"cannot open {masked(url)}: fsspec has no package for {protocol}:// ({exc})") from exc
    return True


__all__ = ["FsspecFolder", "open_folder"]
