"""What the place of a checkpoint can do: each path answers for itself, so that no code tests for a class of store.

A directory of this machine can do everything. Another kind of path, an :class:`OpenPath`, has the attributes that are
looked for here, as :class:`~shardckpt.storage.remote.RemotePath` has.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.storage.remote import RemotePath

    _Base = Path  # code that reads a checkpoint takes one as a Path, and uses what it has
else:
    _Base = object

_T = TypeVar("_T")


def has_local_files(path: Path) -> bool:
    """Return whether the system opens, links and renames files there; if not, there are requests, and a marker."""
    return bool(getattr(path, "has_local_files", True))


def lacks_directory(path: Path) -> bool:
    """Return whether no directory has the path; False for a URL, where that takes a request, and a listing says it."""
    return has_local_files(path) and not path.is_dir()


def find_ability(path: Path, ability: Callable[..., _T]) -> _T | None:
    """Return the folder of a store if it has an ability, one of :mod:`shardckpt.storage.store_abilities`; else None."""
    folder: Any = getattr(path, "folder", None)
    return folder if isinstance(folder, cast("type[_T]", ability)) else None


def on_store(path: Path) -> RemotePath | None:
    """Return the path as a RemotePath, which has a folder, sizes and ranges; None if the files are local."""
    return None if has_local_files(path) else cast("RemotePath", path)


class OpenPath(_Base):
    """What stands for a path where the system has none: a file in an open directory, or an object of a store.

    It has the part of pathlib's interface that reading a checkpoint needs; each class adds how it looks and lists.

    Attributes:
        url: The path or URL that opens it again, in any process; a URL with any password in it.
    """

    url: str

    @property
    def suffix(self) -> str:
        """The suffix of the name, as in pathlib."""
        return PurePosixPath(self.name).suffix

    def refresh(self) -> Path:
        """Return the same without what was listed; a directory is listed anew each time."""
        return self

    def hold(self) -> Path:
        """Return what :func:`~shardckpt.storage.directory.open_directory` does at a first attempt."""
        return self.refresh()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)
