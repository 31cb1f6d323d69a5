from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from shardckpt import settings
from shardckpt.errors import StorageError
from shardckpt.integrations import multipart
from shardckpt.integrations.fsspec.folder import FsspecFolder
from shardckpt.storage import RemotePath
from shardckpt.storage.remote import list_objects
from tests.remote import jobs


@pytest.mark.usefixtures("no_pauses")
def test_a_folder_that_changes_while_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a filesystem meets an entry that has gone, the folder is listed again: it is not taken for empty."""
    (tmp_path / "object").write_bytes(b"12345")
    errors = iter([FileNotFoundError("another object has gone meanwhile")])
    listing = LocalFileSystem.ls

    def ls(filesystem: LocalFileSystem, *args: Any, **kwargs: Any) -> Any:
        for error in errors:
            raise error
        return listing(filesystem, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "ls", ls)
    folder = FsspecFolder(f"local://{tmp_path}", LocalFileSystem(), str(tmp_path))
    assert list_objects(folder) == {"object": 5}
    assert list_objects(FsspecFolder("local://absent", LocalFileSystem(), str(tmp_path / "absent"))) == {}


def _filled(root: Path, *names: str) -> FsspecFolder:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return FsspecFolder(f"local://{root}", LocalFileSystem(), str(root))


def test_objects_in_folders_are_listed_by_their_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of a tree has every object at any depth with its size; one that fails below is no empty folder."""
    names = ["x", "a/x", "a/b/c/d", "a/b/e", "f/g"]
    folder = _filled(tmp_path, *names)
    (tmp_path / "empty" / "inner").mkdir(parents=True)
    assert list_objects(folder) == {name: len(name) for name in names}
    assert folder.files() == {"x": 1}
    assert sorted(folder.folders()) == ["a", "empty", "f"]
    listing = LocalFileSystem.ls

    def ls(filesystem: LocalFileSystem, path: str, *args: Any, **kwargs: Any) -> Any:
        if path.endswith("/b"):
            raise ConnectionError("the store does not answer")
        return listing(filesystem, path, *args, **kwargs)

    monkeypatch.setattr(LocalFileSystem, "ls", ls)
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
    with pytest.raises(StorageError, match=r"cannot list local:.*the store does not answer"):
        list_objects(folder)


def test_a_path_on_a_store_knows_its_folders(tmp_path: Path) -> None:
    """Objects in folders have sizes, are files, and are listed folder by folder; the top is listed without them."""
    place = RemotePath(_filled(tmp_path, "x", "a/x", "a/b/c"))
    assert (place / "a" / "b" / "c").size == (place / "a/b/c").size == len("a/b/c")
    assert (place / "a/x").is_file()
    assert not (place / "a/b").is_file()
    assert not (place / "a/gone").exists()
    assert [path.name for path in place.iterdir()] == ["x"]
    assert [(path.name, str(path)) for path in (place / "a").iterdir()] == [("x", f"local://{tmp_path}/a/x")]
    with pytest.raises(FileNotFoundError):
        _ = (place / "a/gone").size


def test_a_folder_goes_with_its_empty_folders_only(tmp_path: Path) -> None:
    """What is left of a tree whose objects are deleted is removed; a folder with an object at any depth stays."""
    folder = _filled(tmp_path, "kept/a/b/x")
    for name in ("gone/a/b", "gone/c", "kept/d"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("gone", "kept", "absent"):
        folder.remove_folder(name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept/a/b/x").read_bytes() == b"kept/a/b/x"


def test_folders_are_made_but_no_buckets(tmp_path: Path) -> None:
    """Where a store has folders, those of the URL are made; its first part, a bucket elsewhere, must be there."""
    jobs.save(f"local://{tmp_path}/new/folder/c", 5.0)
    jobs.check(f"local://{tmp_path}/new/folder/c", 5.0)
    with pytest.raises(StorageError, match=r"cannot upload local:///no-such-bucket/c/.*FileNotFoundError"):
        jobs.save("local:///no-such-bucket/c", 5.0)
    assert not Path("/no-such-bucket").exists()


def test_a_server_that_repeats_a_page_of_uploads_is_asked_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of uploads ends where the next page is to begin at the same place: such a server knows no pages."""
    asked: list[dict[str, Any]] = []

    class Client:
        def call_s3(self, _name: str, **arguments: Any) -> dict[str, Any]:
            asked.append(arguments)
            upload = {"Key": f"step/{len(asked)}", "UploadId": "1", "Initiated": datetime.now(timezone.utc)}
            markers = {"NextKeyMarker": "step/1", "NextUploadIdMarker": "1"}
            return {"Uploads": [upload], "IsTruncated": len(asked) < 100, **markers}

    monkeypatch.setattr(multipart, "_make_client", lambda *_: Client())
    assert [upload.name for upload in multipart.list_uploads("s3://bucket/step", {}) or ()] == ["1", "2"]
    assert len(asked) == 2
