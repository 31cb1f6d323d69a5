"""Operations on a place: a directory, or a folder on a store, with one call for both.

A listing of a folder on a store has the size in bytes of each object below it, by path. A folder of checkpoints is
listed once, not once for each of them: :func:`list_by_folder` splits its listing, and :func:`attach_listing` gives each
checkpoint its own.
"""

from __future__ import annotations

import errno
import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError
from shardckpt.storage.abilities import find_ability, on_store
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.storage.open_path import OpenPath
from shardckpt.storage.remote import HasFolders, ListsFolders, attempt, list_objects, skip_impossible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

#: The usual scheme of a store, by the others that open the same objects.
_ALIASES = {"s3a": "s3", "gcs": "gs", **dict.fromkeys(("azure", "abfs", "abfss"), "az")}


def find_url(place: Path) -> str:
    """Return the path or URL that opens a place again, in any process; a URL with any password in it."""
    return place.url if isinstance(place, OpenPath) else str(place)


def find_parent(place: Path) -> str:
    """Return the path or URL of the folder that a place is in."""
    return os.path.dirname(find_url(place)) or "."  # noqa: PTH120 - of a URL, too


def find_real_name(place: Path) -> PurePosixPath:
    """Return a name that is equal for all paths and URLs of a place: without links, with the store's usual scheme."""
    if (remote := on_store(place)) is None:
        return PurePosixPath(os.path.realpath(place))
    scheme, _, rest = remote.url.rpartition("::")[2].partition("://")
    return PurePosixPath(f"{_ALIASES.get(scheme, scheme)}:/{rest}")


def find_bucket(url: str) -> str:
    """Return a URL's scheme and host: ``s3://bucket``."""
    return "/".join(url.split("/", 3)[:3])


def list_names(place: Path) -> list[str]:
    """Return the names of all entries of a directory, or of the objects directly in a URL; none if it does not exist.

    A URL is listed anew.
    """
    if (remote := on_store(place)) is not None:
        return skip_impossible(remote.url, attempt("list", remote, remote.folder.files))
    return _scan(place, lambda _: True)


def list_entries(place: Path) -> list[str]:
    """Return the names of the files and folders directly in a place, of a URL by :func:`read_listing`.

    It is a StorageError if a directory does not exist.
    """
    if (listing := read_listing(place)) is not None:
        return [*dict.fromkeys(path.partition("/")[0] for path in listing)]
    with wrap_os_errors("list", place):
        return [path.name for path in place.iterdir()]


def list_folders(place: Path) -> list[str]:
    """Return the names of the folders directly in a place; none if it does not exist.

    A URL is listed anew. It is a StorageError if the plugin of a store cannot list folders.
    """
    if (remote := on_store(place)) is None:
        return _scan(place, _is_directory)
    folder = remote.folder
    if not isinstance(folder, ListsFolders):
        raise StorageError(
            f"cannot find checkpoints in {place}: the plugin that serves it cannot list folders "
            f"({type(folder).__name__} lacks methods of shardckpt.storage.ListsFolders); give a directory, or a URL "
            "that fsspec serves"
        )
    return skip_impossible(remote.url, attempt("list the folders of", remote, folder.folders))


def can_list_folders(place: Path) -> bool:
    """Return whether :func:`list_folders` lists the folders in a place."""
    remote = on_store(place)
    return remote is None or isinstance(remote.folder, ListsFolders)


def read_listing(place: Path) -> Mapping[str, int] | None:
    """Return the listing that is attached to a URL, or a new one; None for a directory."""
    if (remote := on_store(place)) is None:
        return None
    return list_objects(remote.folder) if remote.listing is None else remote.listing


def list_tree(place: Path) -> Mapping[str, int] | None:
    """Return the listing of a URL, which is requested once for all paths of it; None for a directory.

    It is a StorageError if the plugin of a store cannot list inner folders.
    """
    remote = on_store(place)
    return None if remote is None else remote.list_tree()


def list_by_folder(place: Path) -> dict[str, dict[str, int]] | None:
    """Return the listing of each folder directly in a URL, by name, and that of the URL itself as ``""``.

    It is None for a directory, and if the plugin of a store cannot list inner folders.
    """
    if find_ability(place, HasFolders) is None:
        return None
    listings = {"": dict(read_listing(place) or {})}
    for path, size in listings[""].items():
        name, separator, inner = path.partition("/")
        if separator:
            listings.setdefault(name, {})[inner] = size
    return listings


def attach_listing(place: Path, listings: Mapping[str, dict[str, int]] | None, name: str = "") -> Path:
    """Return a folder of a store with its listing of :func:`list_by_folder`: who reads it requests none."""
    if listings is None or (remote := on_store(place)) is None:
        return place
    listing = listings.get(name, {})
    path = remote.use_listing(listing)
    path.listing = listing
    return path


def get_attached_listing(place: Path) -> Mapping[str, int]:
    """Return the listing that is attached to a folder of a store; empty if there is none, and for a directory."""
    remote = on_store(place)
    return {} if remote is None else remote.listing or {}


def remove_file(path: Path) -> None:
    """Remove a file, or an object of a store; no error if it does not exist."""
    if (remote := on_store(path)) is not None:
        remote.delete()
        return
    with wrap_os_errors("remove", path):
        path.unlink(missing_ok=True)


def _scan(place: Path, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    with wrap_os_errors("list", place):
        try:
            with os.scandir(place) as entries:
                return [entry.name for entry in entries if is_wanted(entry)]
        except FileNotFoundError:
            return []


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory or a link to one; a link to itself is neither."""
    try:
        return entry.is_dir()
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        return False
