"""A path that the system does not have: a file in an open directory, or an object of a store."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    _Base = Path  # code that reads a checkpoint uses it as a Path
else:
    _Base = object


class OpenPath(_Base):
    """The part of pathlib's interface that reading a checkpoint needs; each class adds how it looks and lists.

    ``url`` is the path or URL that opens it again, in any process; a URL with any password in it.
    """

    url: str

    @property
    def suffix(self) -> str:
        """The suffix of the name, as in pathlib."""
        return PurePosixPath(self.name).suffix

    def refresh(self) -> Path:
        """Return the same without its listing; a directory is listed anew each time."""
        return self

    def hold(self) -> Path:
        """Return the result of :func:`~shardckpt.storage.directory.open_directory` in a first attempt."""
        return self.refresh()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.url == other.url

    def __hash__(self) -> int:
        return hash(self.url)
