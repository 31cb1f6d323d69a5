"""The folder at a URL, by fsspec; credentials and endpoints come from fsspec's own configuration."""

from __future__ import annotations

import errno
import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]

from shardckpt.errors import StorageError
from shardckpt.storage import mask_password

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class FsspecFolder:
    """The objects directly below a URL.

    Args:
        url: The URL, without a slash at its end.
        filesystem: fsspec's filesystem of the protocol.
        root: The folder's path in that filesystem.
    """

    def __init__(self, url: str, filesystem: Any, root: str) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root

    def files(self) -> dict[str, int]:
        """Return the size in bytes of each object, by name, as the store has them now."""
        found = {}
        for name, entry in self._entries("file"):
            found[name] = int(self._filesystem.size(entry["name"]) if entry["size"] is None else entry["size"])
        return found

    def folders(self) -> list[str]:
        """Return the names of the folders directly below, as the store has them now."""
        return [name for name, _ in self._entries("directory")]

    def remove_folder(self, name: str) -> None:
        """Remove an empty folder, on stores that have folders; keep one that is not empty."""
        with suppress(OSError, NotImplementedError):  # most object stores have no folders
            if not self._filesystem.ls(self._path(name)):  # rmdir of some filesystems removes the content, too
                self._filesystem.rmdir(self._path(name))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of an object from ``offset`` on."""
        return bytes(self._filesystem.cat_file(self._path(name), start=offset, end=offset + nbytes))

    def upload(self, name: str, path: Path) -> None:
        """Upload a local file as an object. Creates the folder on stores that need one, but never a bucket."""
        try:
            self._filesystem.put_file(str(path), self._path(name))
        except FileNotFoundError:
            if not self._filesystem.exists(re.match("/*[^/]*", self._root)[0]):  # type: ignore[index]
                raise
            self._filesystem.makedirs(self._root, exist_ok=True)
            self._filesystem.put_file(str(path), self._path(name))

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._filesystem.rm_file(self._path(name))

    def _entries(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Yield the entries of one kind directly below the URL, by name."""
        self._filesystem.invalidate_cache()  # another process may have written since the last listing
        try:
            entries = self._filesystem.ls(self._root, detail=True)
        except FileNotFoundError as exc:
            if not self._filesystem.exists(self._root):
                return
            # A filesystem with directories stats one entry after the other, and one has been deleted meanwhile.
            # EAGAIN: the caller lists again instead of taking the folder for empty.
            raise OSError(errno.EAGAIN, "the folder changed while it was listed") from exc
        for entry in entries:
            path = entry["name"].rstrip("/") if entry["type"] == "directory" else entry["name"]
            folder, _, name = path.rpartition("/")
            if entry["type"] == kind and name and folder.strip("/") == self._root.strip("/"):
                yield name, entry

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def open_folder(url: str) -> FsspecFolder | None:
    """Open the folder at a URL.

    Args:
        url: The URL; ``outer::inner://`` chains two protocols.

    Returns:
        The folder, or None if fsspec does not know a protocol of the URL.

    Raises:
        StorageError: fsspec knows the protocol, but the package for it is not installed.
    """
    if not all(_knows(protocol, url) for protocol in url.partition("://")[0].split("::")):
        return None
    filesystem, root = fsspec.core.url_to_fs(url)
    return FsspecFolder(url, filesystem, root)


def _knows(protocol: str, url: str) -> bool:
    """Return whether fsspec knows a protocol; raise if its package is missing."""
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        return False
    except ImportError as exc:
        raise StorageError(
            f"cannot open {mask_password(url)}: fsspec has no package for {protocol}:// ({exc})"
        ) from exc
    return True


__all__ = ["FsspecFolder", "open_folder"]
