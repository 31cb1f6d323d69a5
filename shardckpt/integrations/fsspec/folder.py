"""The folder at a URL, by fsspec; credentials and endpoints come from fsspec's own configuration."""

from __future__ import annotations

import datetime as dt
import errno
import functools
import inspect
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import fsspec  # type: ignore[import-untyped]

from shardckpt import settings
from shardckpt.errors import StorageError
from shardckpt.integrations import multipart
from shardckpt.integrations.s3_options import SCHEMES, make_s3fs_options
from shardckpt.storage.memory_budget import plan_upload
from shardckpt.storage.store_errors import find_problem, mask_password

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from shardckpt.storage.store_abilities import PendingUpload

#: Filesystems' names for the time of the last write: s3fs, adlfs, local files, gcsfs, in memory.
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "created")


class FsspecFolder:
    """The objects directly below a URL, which has no slash at its end.

    ``filesystem`` is fsspec's of the protocol, ``root`` the folder's path in it, and ``options`` are as for
    :func:`open_folder`.
    """

    def __init__(self, url: str, filesystem: Any, root: str, options: Mapping[str, str] = {}) -> None:
        self.url = url
        self._filesystem = filesystem
        self._root = root
        self._options = options
        #: Bytes of parts that an upload may hold; None for as many as the settings say.
        self._room: int | None = None

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

    def times(self) -> dict[str, float]:
        """Return when each object below the URL was written, by path, in seconds since 1970, where fsspec says it."""
        self._filesystem.invalidate_cache()
        found = {name: _find_time(self._filesystem.info(self._path(name))) for name in self.tree()}
        return {name: time for name, time in found.items() if time is not None}

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
            self._put(name, path)
        except FileNotFoundError:
            if not self._filesystem.exists(re.match("/*[^/]*", self._root)[0]):  # type: ignore[index]
                raise
            self._filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)
            self._put(name, path)

    def limit_uploads(self, nbytes: int) -> None:
        """Hold at most so many bytes of an object at a time, on filesystems that can be told."""
        self._room = nbytes

    def copy(self, source: str, name: str, nbytes: int) -> bool:  # noqa: ARG002 - filesystems copy any size
        """Copy an object of the same protocol, where the filesystem can."""
        protocol = self.url.partition("://")[0]
        if "::" in self.url or source.partition("://")[0] != protocol:
            return False
        try:
            self._filesystem.cp_file(self._filesystem._strip_protocol(source), self._path(name))  # noqa: SLF001 - fsspec calls it, too
        except NotImplementedError:
            return False
        return True

    def delete(self, name: str) -> None:
        """Delete an object."""
        self._filesystem.rm_file(self._path(name))

    def uploads(self) -> list[PendingUpload] | None:
        """Return the multipart uploads on S3 that have not ended; other filesystems show none."""
        is_s3 = self.url.partition("://")[0] in SCHEMES
        return multipart.list_uploads(self.url, self._options) if is_s3 else []

    def abort_upload(self, upload: PendingUpload) -> None:
        """Abort one of these."""
        multipart.abort_upload(self.url, upload, self._options)

    def _put(self, name: str, path: Path) -> None:
        limits = plan_upload(self._room, path.stat().st_size)
        # s3fs's names; by default it holds ten parts of 50 MiB. Others send one part after the other
        known = {"chunksize": limits.part_bytes, "max_concurrency": limits.parts}
        options = {key: value for key, value in known.items() if key in self._upload_options}
        self._filesystem.put_file(str(path), self._path(name), **options)

    @functools.cached_property
    def _upload_options(self) -> Collection[str]:
        """The names of the options with which the filesystem uploads a file."""
        upload = getattr(self._filesystem, "_put_file", self._filesystem.put_file)
        return inspect.signature(upload).parameters

    def _list(self, within: str) -> tuple[dict[str, int], list[str]]:
        """Return the objects directly in a folder with their sizes in bytes, and the folders in it, by path.

        ``within`` is the folder's path below the URL; ``""`` is the URL itself.
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


def _find_time(entry: dict[str, Any]) -> float | None:
    """Return when an object was written, in seconds since 1970; None if its filesystem does not say."""
    found = next((entry[name] for name in _TIMES if entry.get(name) is not None), None)
    if isinstance(found, str):
        found = dt.datetime.fromisoformat(found.replace("Z", "+00:00"))  # Python 3.10 does not read the Z
    if isinstance(found, dt.datetime):  # one without a time zone is of UTC
        found = (found if found.tzinfo else found.replace(tzinfo=dt.timezone.utc)).timestamp()
    return float(found) if isinstance(found, int | float) else None


def open_folder(url: str, options: Mapping[str, str] = {}) -> FsspecFolder | None:
    """Open the folder at a URL; None if fsspec does not know a protocol of it. ``outer::inner://`` chains two.

    ``options`` are of the bucket, in addition to the environment's. If the package for a protocol is not installed,
    that is a StorageError.
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
    filesystem, root = fsspec.core.url_to_fs(url, **make_s3fs_options(url, options))
    return FsspecFolder(url, filesystem, root, options)
