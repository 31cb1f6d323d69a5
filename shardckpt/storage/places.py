"""Operations on a place: a directory, or a folder on a store, with one call for both.

The listing of a folder on a store has the size in bytes of each object below the folder, by path. One request lists a
folder of checkpoints: :func:`list_by_folder` splits the listing, and :func:`attach_listing` gives each checkpoint its
own.
"""

from __future__ import annotations

import errno
import logging
import os
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from shardckpt.errors import StorageError, is_first_warning
from shardckpt.storage.abilities import find_ability, on_store
from shardckpt.storage.filesystem import wrap_os_errors
from shardckpt.storage.open_path import OpenPath
from shardckpt.storage.remote import HasFolders, ListsFolders, attempt, list_objects, skip_impossible

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

logger = logging.getLogger(__name__)

#: The usual scheme of a store, by the other schemes that open the same objects.
_ALIASES = {"s3a": "s3", "gcs": "gs", **dict.fromkeys(("azure", "abfs", "abfss"), "az")}
#: Errors of a link that leads to no directory: it leads to itself, through a file, or to too long a path.
_LEADS_NOWHERE = {errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG}


def get_url(place: Path) -> str:
    """Return the path or URL that opens a place again, in any process; passwords in a URL stay."""
    return place.url if isinstance(place, OpenPath) else str(place)


def get_parent(place: Path) -> str:
    """Return the path or URL of the folder that a place is in; a bucket or the root directory is its own parent."""
    url = get_url(place)
    parent = os.path.dirname(url) or "."  # noqa: PTH120 - of a URL, too
    if "://" in url:
        return max(parent, get_bucket(url), key=len)  # the parent of s3://bucket would be s3:
    if url == ".":
        return ".."
    return f"{url}/.." if place.name == ".." else parent


def resolve_name(place: Path) -> PurePosixPath:
    """Return one name for all paths and URLs of a place: links are followed, and a store has its usual scheme."""
    if (remote := on_store(place)) is None:
        return PurePosixPath(os.path.realpath(place))
    scheme, _, rest = remote.url.rpartition("::")[2].partition("://")
    return PurePosixPath(f"{_ALIASES.get(scheme, scheme)}:/{rest}")


def get_bucket(url: str) -> str:
    """Return a URL's scheme and host: ``s3://bucket``."""
    return "/".join(url.split("/", 3)[:3])


def list_names(place: Path) -> list[str]:
    """Return the names of all entries of a directory, or of the objects directly in a URL; [] for a missing place.

    A URL is listed anew.
    """
    if (remote := on_store(place)) is not None:
        return skip_impossible(remote.url, attempt("list", remote, remote.folder.files))
    return _scan_directory(place, lambda _: True)


def list_entries(place: Path) -> list[str]:
    """Return the names of the files and folders directly in a place; a URL's by :func:`read_listing`.

    A missing directory raises StorageError. A URL without objects has no names: a store does not know empty folders.
    """
    if (listing := read_listing(place)) is not None:
        return [*dict.fromkeys(path.partition("/")[0] for path in listing)]
    with wrap_os_errors("list", place):
        return [path.name for path in place.iterdir()]


def list_folders(place: Path) -> list[str]:
    """Return the names of the folders directly in a place, links to folders included; [] for a missing place.

    A URL is listed anew. A store whose plugin cannot list folders raises StorageError.
    """
    if (remote := on_store(place)) is None:
        return _scan_directory(place, _is_directory)
    folder = remote.folder
    if not isinstance(folder, ListsFolders):
        raise StorageError(
            f"cannot find checkpoints in {place}: the plugin that serves it cannot list folders "
            f"({type(folder).__name__} lacks methods of shardckpt.storage.ListsFolders); give a directory, or a URL "
            "that fsspec serves"
        )
    return skip_impossible(remote.url, attempt("list the folders of", remote, folder.folders))


def can_list_folders(place: Path) -> bool:
    """Return whether :func:`list_folders` can list the folders in a place."""
    remote = on_store(place)
    return remote is None or isinstance(remote.folder, ListsFolders)


def read_listing(place: Path) -> Mapping[str, int] | None:
    """Return the listing that is attached to a URL, or a new one; None for a directory."""
    if (remote := on_store(place)) is None:
        return None
    return list_objects(remote.folder) if remote.listing is None else remote.listing


def list_tree(place: Path) -> Mapping[str, int] | None:
    """Return the listing of a URL; None for a directory. All paths made from one path share one request.

    A store whose plugin cannot list inner folders raises StorageError.
    """
    remote = on_store(place)
    return None if remote is None else remote.list_tree()


def list_by_folder(place: Path) -> dict[str, dict[str, int]] | None:
    """Return the listing of each folder directly in a URL, by name, and the listing of the URL itself as ``""``.

    None for a directory, and for a store whose plugin cannot list inner folders.
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
    """Return a folder of a store with a listing attached, so that readers need no request; a directory unchanged.

    ``listings`` are the result of :func:`list_by_folder`. A name that they lack counts as an empty folder.
    """
    if listings is None or (remote := on_store(place)) is None:
        return place
    return remote.attach_listing(listings.get(name, {}))


def get_attached_listing(place: Path) -> Mapping[str, int]:
    """Return the listing that is attached to a folder of a store; empty without one, and for a directory."""
    remote = on_store(place)
    return {} if remote is None else remote.listing or {}


def remove_file(path: Path) -> None:
    """Remove a file, or an object of a store; no error if it does not exist."""
    if (remote := on_store(path)) is not None:
        remote.delete()
        return
    with wrap_os_errors("remove", path):
        path.unlink(missing_ok=True)


def _scan_directory(place: Path, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Return the names of the wanted entries of a directory; [] for a missing one."""
    with wrap_os_errors("list", place):
        try:
            with os.scandir(place) as entries:
                return [entry.name for entry in entries if is_wanted(entry)]
        except FileNotFoundError:
            return []


def _is_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory or a link to one; False, with a warning, for a target without access.

    Any other OSError is raised: it may be transient, and the entry may be the newest checkpoint.
    """
    try:
        return entry.is_dir()
    except OSError as exc:
        if exc.errno in _LEADS_NOWHERE:
            return False
        if exc.errno != errno.EACCES or not entry.is_symlink():
            raise
        if is_first_warning(__name__, entry.path):
            logger.warning(
                "%s is skipped: it is a link, and this user has no access to the target (%s); give access, or remove "
                "the link",
                entry.path,
                exc.strerror,
            )
        return False
