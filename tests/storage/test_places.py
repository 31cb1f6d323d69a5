"""Places: their parents, and the folders in them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import RemotePath, places
from shardckpt.storage.places import get_parent, list_folders
from tests.tables import table


@table(
    ("place", "parent"),
    [
        (".", ".."),
        ("..", "../.."),
        ("a/..", "a/../.."),
        ("a", "."),
        ("a/b", "a"),
        ("/a", "/"),
        ("/", "/"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/run", "s3://bucket"),
        ("s3://bucket/run/step-1", "s3://bucket/run"),
    ],
)
def test_the_parent_of_a_place(place: str, parent: str) -> None:
    """The parent of a place is the folder that it is in, of the current directory, too; a bucket has no other."""
    folder: Any = SimpleNamespace(url=place)
    assert get_parent(RemotePath(folder) if "://" in place else Path(place)) == parent


def test_links_that_lead_nowhere_are_no_folders(tmp_path: Path) -> None:
    """A link to itself, to what is gone, or through a file does not hide the folders beside it."""
    (tmp_path / "step-1").mkdir()
    (tmp_path / "file").touch()
    for name, target in {"itself": "itself", "gone": "nowhere", "through": "file/x", "long": "x" * 300}.items():
        (tmp_path / name).symlink_to(target)
    assert list_folders(tmp_path) == ["step-1"]


class _Entry:
    """An entry whose target cannot be looked at."""

    name = "theirs"

    def __init__(self, path: str, number: int) -> None:
        self.path = path
        self._number = number

    def is_symlink(self) -> bool:
        """A link."""
        return True

    def is_dir(self) -> NoReturn:
        """Fail as the system does."""
        raise OSError(self._number, os.strerror(self._number))


@table("number", [errno.EACCES, errno.ESTALE])
def test_a_link_without_access_is_skipped_with_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A link to what this user may not look at is skipped and said once; a failure that may pass is an error."""
    (tmp_path / "step-1").mkdir()
    scan = os.scandir

    class Scan:
        """The entries of a directory, and one more."""

        def __init__(self, place: Path) -> None:
            self._found = scan(place)

        def __enter__(self) -> list[Any]:
            return [*self._found, _Entry(str(tmp_path / "theirs"), number)]

        def __exit__(self, *_: object) -> None:
            self._found.close()

    monkeypatch.setattr(places.os, "scandir", Scan)
    if number == errno.ESTALE:
        with pytest.raises(StorageError):
            list_folders(tmp_path)
        return
    assert list_folders(tmp_path) == list_folders(tmp_path) == ["step-1"]
    assert [record.getMessage().partition(" is skipped")[0] for record in caplog.records] == [str(tmp_path / "theirs")]
