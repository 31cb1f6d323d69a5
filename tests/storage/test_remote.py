from __future__ import annotations

import copy
import pickle
import threading
from typing import TYPE_CHECKING

import fsspec
import pytest

from shardckpt.engine import locate
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import RemotePath

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def folder() -> Iterator[RemotePath]:
    """A folder of a store, with one object."""
    files = fsspec.filesystem("memory")
    files.pipe("/pickled/run/a", b"abc")
    found = locate("memory://pickled/run", get_plugin_manager())
    assert isinstance(found, RemotePath)
    yield found
    files.rm("/pickled", recursive=True)


def test_a_path_goes_through_a_pickle(folder: RemotePath) -> None:
    """A path to a store is equal after a pickle, reads the same, and lists the store anew."""
    assert (folder / "a").size == 3
    fsspec.filesystem("memory").pipe("/pickled/run/b", b"new")
    for path in (folder, folder / "a"):
        again = pickle.loads(pickle.dumps(path))
        assert again == path
        assert again.name == path.name
        assert copy.deepcopy(path) == copy.copy(path) == path
    assert [path.name for path in pickle.loads(pickle.dumps(folder)).iterdir()] == ["a", "b"]
    assert pickle.loads(pickle.dumps(folder / "a")).read_range(1, 2) == b"bc"


class _Locked:
    """A plugin's folder that holds what no pickle takes."""

    url = "vault://user:secret@host/run"

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_folder_that_cannot_be_pickled_is_named() -> None:
    """The error names the URL without its password, the plugin's class, and what to send instead."""
    with pytest.raises(pickle.PicklingError, match=r"vault://user:\*\*\*@host/run/a cannot .* _Locked .*send the URL"):
        pickle.dumps(RemotePath(_Locked()) / "a")  # type: ignore[arg-type]
