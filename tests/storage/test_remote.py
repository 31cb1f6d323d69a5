from __future__ import annotations

import copy
import errno
import os
import pickle
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import fsspec
import pytest

from shardckpt.engine import locate
from shardckpt.engine.locations import refuse_overlap
from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import RemotePath
from shardckpt.storage.abilities import has_links, has_local_files, on_store, takes_requests
from shardckpt.storage.places import list_folders, list_names
from shardckpt.storage.remote import attempt, limit_attempts, list_objects
from tests.tables import table

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


@table(("one", "other"), [("s3", "s3a"), ("gs", "gcs"), ("az", "azure"), ("az", "abfs"), ("abfss", "abfs")])
def test_two_schemes_of_a_store_name_one_place(one: str, other: str) -> None:
    """What is read by one of them is not replaced by what is written by the other."""
    places: list[Any] = [RemotePath(SimpleNamespace(url=f"{scheme}://c/run")) for scheme in (one, other)]  # type: ignore[arg-type]
    with pytest.raises(CheckpointingException, match="is the source"):
        refuse_overlap(places[:1], places[1])


class _Locked:
    """A plugin's folder that holds what no pickle takes."""

    url = "vault://user:secret@host/run"

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_folder_that_cannot_be_pickled_is_named() -> None:
    """The error names the URL without its password, the plugin's class, and what to send instead."""
    with pytest.raises(pickle.PicklingError, match=r"vault://user:\*\*\*@host/run/a cannot .* _Locked .*send the URL"):
        pickle.dumps(RemotePath(_Locked()) / "a")  # type: ignore[arg-type]


class EndpointConnectionError(Exception):
    """As botocore's is called."""


def test_the_cause_of_a_stores_error_comes_first(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """What to do is said before the client's text, which is cut; where the cause is unknown, that text is whole."""
    monkeypatch.setenv("SHARDCKPT_REMOTE_ATTEMPTS", "1")

    def list_nothing(error: Exception) -> str:
        def fail() -> None:
            raise error

        with pytest.raises(StorageError) as caught:
            attempt("list", folder, fail)
        return str(caught.value)

    long = "http://127.0.0.1:9" + " refused" * 50
    said = list_nothing(EndpointConnectionError(long))
    assert said.startswith(f"cannot list {folder}: no store answers there: check the host and the port")
    assert "; the client: EndpointConnectionError: http://127.0.0.1:9 refused" in said
    assert len(said) < len(long) + 100
    assert list_nothing(ValueError(long)) == f"cannot list {folder}: ValueError: {long}"


class _Failing:
    """A plugin's folder whose every call fails, and counts."""

    url = "vault://host/failing"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def files(self) -> dict[str, int]:
        return {}

    def delete(self, name: str) -> None:
        self.calls.append(name)
        raise ConnectionError(name)

    def open_write(self, name: str, part_bytes: int) -> Any:
        self.calls.append(name)
        raise ConnectionError(name)


def test_threads_that_delete_are_as_patient_as_the_caller() -> None:
    """What a training waits for repeats nothing when its time is used up, of several objects neither."""
    folder: Any = _Failing()
    with limit_attempts(0), pytest.raises(StorageError, match=r"cannot delete .* while the training waits"):
        RemotePath(folder).delete_all(["a", "b", "c"])
    assert len(folder.calls) == len(set(folder.calls)) <= 3


def test_threads_that_wait_at_one_time_use_it_up_once(no_pauses: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of a second that four threads meet takes a second of what a training waits, not four."""
    folder: Any = _Failing()
    met, now = threading.Barrier(4), [0.0]

    def fail_once(name: str) -> None:
        folder.calls.append(name)
        if folder.calls.count(name) == 1:
            met.wait(20)  # all have begun
            now[0] = 1.0
            met.wait(20)
            raise ConnectionError(name)

    folder.delete = fail_once
    monkeypatch.setattr(
        "shardckpt.storage.remote.time", SimpleNamespace(monotonic=lambda: now[0], sleep=lambda _: None)
    )
    with limit_attempts(3):
        RemotePath(folder).delete_all(["a", "b", "c", "d"])
    assert sorted(folder.calls) == ["a", "a", "b", "b", "c", "c", "d", "d"]


def test_a_copy_between_stores_is_repeated(folder: RemotePath, no_pauses: None) -> None:
    """A store that fails while it takes the parts is asked again, and named with the object in the end."""
    target: Any = _Failing()
    with pytest.raises(StorageError, match=rf"cannot copy {folder}/a to vault://host/failing/b in \d+ attempts: Conn"):
        (RemotePath(target) / "b").copy_from(folder / "a")
    assert len(target.calls) > 1


def test_a_full_temporary_folder_is_told(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a store takes files alone, and the temporary folder takes none, the error says so, with the object."""

    def fail(**_: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", fail)
    store: Any = _OddNames()
    with pytest.raises(StorageError, match=r"cannot write a temporary file for vault://.*/odd/b: .* No space.*TMPDIR"):
        (RemotePath(store) / "b").copy_from(folder / "a")


class _OddNames:
    """A plugin's folder with objects and folders whose names no file of a checkpoint can have."""

    url = "vault://user:secret@host/odd"
    found: ClassVar[dict[str, int]] = {"": 0, "a": 1, ".": 2, "..": 3, "b\0": 4}

    def files(self) -> dict[str, int]:
        return dict(self.found)

    def tree(self) -> dict[str, int]:
        return {**self.found, "c/d": 5, "c//e": 6, "/f": 7, "c/../g": 8}

    def folders(self) -> list[str]:
        return ["c", "", "..", "."]

    def remove_folder(self, name: str) -> None:
        """Do nothing."""


def test_names_that_no_checkpoint_has_are_left_out_of_listings(caplog: pytest.LogCaptureFixture) -> None:
    """Empty parts, dots and null characters: their objects are skipped, counted and named once; the rest is listed."""
    for _ in range(2):
        place = RemotePath(_OddNames())  # type: ignore[arg-type]
        assert [path.name for path in place.iterdir()] == list_names(place) == ["a"]
        assert list_objects(place.folder) == place.list_tree() == {"a": 1, "c/d": 5}
        assert list_folders(place) == ["c"]
    (said,) = {record.getMessage() for record in caplog.records}
    assert len(caplog.records) == 1
    assert "vault://user:***@host/odd" in said
    assert "3 objects or folders" in said


class _Mount(type(Path())):  # type: ignore[misc]
    """A folder of a store that the system shows as files."""

    takes_requests = True
    has_links = False


def test_each_ability_of_a_path_is_asked_for_itself(tmp_path: Path) -> None:
    """Where the system opens files, a look may be a request all the same, and no name a link; a URL has neither."""
    asked = [
        (has_local_files(path), has_links(path), takes_requests(path), on_store(path) is None)
        for path in (tmp_path, _Mount(tmp_path), RemotePath(_OddNames()))  # type: ignore[arg-type]
    ]
    assert asked == [(True, True, False, True), (True, False, True, True), (False, False, True, False)]
