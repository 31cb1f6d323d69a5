"""The folder at a URL, by fsspec; credentials and endpoints come from fsspec's own configuration."""

from __future__ import annotations

import errno
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]

from shardckpt import settings
from shardckpt.errors import StorageError
from shardckpt.storage import find_problem, mask_password

if TYPE_CHECKING:
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
        return self._list("")[0]

    def tree(self) -> dict[str, int]:
        """Return the size in bytes of each object below the URL at any depth, by path, as the store has them now."""
        found: dict[str, int] = {}
        folders = [""]
        # one level after the other, its folders at a time: find() of some filesystems takes an error for no object
        with ThreadPoolExecutor(settings.remote_threads(), "shardckpt-list") as threads:
            while folders:
                listings = [self._list(folders[0])] if len(folders) == 1 else list(threads.map(self._list, folders))
                folders = [name for _, below in listings for name in below]
                for sizes, _ in listings:
                    found |= sizes
        return found

    def folders(self) -> list[str]:
        """Return the names of the folders directly below, as the store has them now."""
        return self._list("")[1]

    def remove_folder(self, name: str) -> None:
        """Remove a folder with only empty folders in it, on stores that have folders; keep one with an object."""
        with suppress(OSError, NotImplementedError):  # most object stores have no folders
            for inner in self._list(name)[1]:
                self.remove_folder(inner)
            self._filesystem.invalidate_cache()
            if not self._filesystem.ls(self._path(name)):  # rmdir of some filesystems removes the content, too
                self._filesystem.rmdir(self._path(name))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes of an object from ``offset`` on."""
        return bytes(self._filesystem.cat_file(self._path(name), start=offset, end=offset + nbytes))

    def upload(self, name: str, path: Path) -> None:
        """Upload a local file as an object. Creates its folders on stores that need them, but never a bucket."""
        try:
            self._filesystem.put_file(str(path), self._path(name))
        except FileNotFoundError:
            if not self._filesystem.exists(re.match("/*[^/]*", self._root)[0]):  # type: ignore[index]
                raise
            self._filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._filesystem.put_file(str(path), self._path(name))

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._filesystem.rm_file(self._path(name))

    def _list(self, within: str) -> tuple[dict[str, int], list[str]]:
        """Return the objects directly in a folder with their sizes in bytes, and the folders in it, by path.

        Args:
            within: The folder's path below the URL; ``""`` is the URL itself.
        """
        root = self._path(within) if within else self._root
        prefix = f"{within}/" if within else ""
        self._filesystem.invalidate_cache()  # another process may have written since the last listing
        try:
            entries = self._filesystem.ls(root, detail=True)
        except FileNotFoundError as exc:
            if find_problem(exc) is not None:  # not the folder is missing, but its bucket
                raise
            if not self._filesystem.exists(root):
                return {}, []
            # A filesystem with directories stats one entry after the other, and one has been deleted meanwhile.
            # EAGAIN: the caller lists again instead of taking the folder for empty.
            raise OSError(errno.EAGAIN, "the folder changed while it was listed") from exc
        sizes, folders = {}, []
        for entry in entries:
            is_folder = entry["type"] == "directory"
            folder, _, name = (entry["name"].rstrip("/") if is_folder else entry["name"]).rpartition("/")
            if not name or folder.strip("/") != root.strip("/"):
                continue
            if is_folder:
                folders.append(prefix + name)
            elif entry["type"] == "file":
                size = self._filesystem.size(entry["name"]) if entry["size"] is None else entry["size"]
                sizes[prefix + name] = int(size)
        return sizes, folders

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
    protocol = ""
    try:
        for protocol in url.partition("://")[0].split("::"):
            fsspec.get_filesystem_class(protocol)
    except ValueError:
        return None
    except ImportError as exc:
        raise StorageError(
            f"cannot open {mask_password(url)}: fsspec has no package for {protocol}:// ({exc})"
        ) from exc
    filesystem, root = fsspec.core.url_to_fs(url)
    return FsspecFolder(url, filesystem, root)


__all__ = ["FsspecFolder", "open_folder"]
