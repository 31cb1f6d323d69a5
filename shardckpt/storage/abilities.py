"""Abilities of the place of a checkpoint: each path answers for itself, so that no code tests for a class of store.

A directory of this machine can do everything. Another kind of path has the attributes that are looked for here, each
for itself, as :class:`~shardckpt.storage.remote.RemotePath` has: one whose files the system opens may take requests
all the same. Operations that both have, each in its way, are in :mod:`~shardckpt.storage.places`. Above storage and
commit few ask which of the two a place is (``tests/test_architecture.py`` names them); others ask for the cost of a
look, or whether a name may be a link.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.storage.remote import RemotePath

_T = TypeVar("_T")


def has_local_files(path: Path) -> bool:
    """Return whether the system, and so any other library, opens the files there by their paths."""
    return bool(getattr(path, "has_local_files", True))


def has_links(path: Path) -> bool:
    """Return whether a name there may be a symbolic link, and a file have several names."""
    return bool(getattr(path, "has_links", True))


def takes_requests(path: Path) -> bool:
    """Return whether each look at a file there is a request: it takes time, has a price, and may find no answer."""
    return bool(getattr(path, "takes_requests", False))


def lacks_directory(path: Path) -> bool:
    """Return whether no directory has the path; False for a URL, where that takes a request, and a listing says it."""
    return not takes_requests(path) and not path.is_dir()


def find_ability(path: Path, ability: Callable[..., _T]) -> _T | None:
    """Return the folder of a store if it has an ability, one of :mod:`shardckpt.storage.store_abilities`; else None."""
    folder: Any = getattr(path, "folder", None)
    return folder if isinstance(folder, cast("type[_T]", ability)) else None


def on_store(path: Path) -> RemotePath | None:
    """Return the path as a RemotePath, which has a folder, sizes and ranges; None if the files are local."""
    return None if has_local_files(path) else cast("RemotePath", path)
