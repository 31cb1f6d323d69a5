"""Staging directories and how they become the target."""

from __future__ import annotations

import contextlib
import errno
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import commit
from shardckpt.storage.owner import Owner
from shardckpt.storage.staging_names import discarded_name, new_save_id


def staged(target: Path, save_id: str = "1", content: bytes = b"new") -> Path:
    """A staging directory with one file."""
    staging = commit.create_staging(target, save_id)
    (staging / "data").write_bytes(content)
    return staging


def test_staging_lies_beside_the_target(tmp_path: Path) -> None:
    """A staging directory is hidden, beside the target, known as such, and made once."""
    target = tmp_path / "deep" / "er" / "ckpt"
    staging = commit.create_staging(target, "abc")
    assert staging == target.with_name(f".ckpt.shardckpt-staging-abc-{Owner.current().text}")
    assert staging.is_dir()
    assert commit.list_staging_directories(target) == [staging]
    assert commit.is_staging(staging)
    assert not commit.is_staging(target)
    with pytest.raises(StorageError, match=rf"cannot create the staging directory {staging}: .* \(EEXIST\)"):
        commit.create_staging(target, "abc")


def test_save_ids_differ() -> None:
    """No two saves have the same name."""
    assert len({new_save_id() for _ in range(100)}) == 100


def test_targets_do_not_mix(tmp_path: Path) -> None:
    """A target's staging directories are its own, not those of a target whose name begins alike."""
    staging = commit.create_staging(tmp_path / "step_1", "a")
    commit.create_staging(tmp_path / "step_10", "b")
    assert commit.list_staging_directories(tmp_path / "step_1") == [staging]
    assert commit.list_staging_directories(tmp_path / "gone" / "x") == []


def test_publish(tmp_path: Path) -> None:
    """Publishing gives the target the staging directory's files; nothing else is left."""
    target = tmp_path / "ckpt"
    commit.publish_staging(staged(target), target)
    assert (target / "data").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_publish_over_an_empty_directory(tmp_path: Path) -> None:
    """An empty directory gives way."""
    target = tmp_path / "ckpt"
    target.mkdir()
    commit.publish_staging(staged(target), target)
    assert (target / "data").read_bytes() == b"new"


def test_two_saves_to_one_path(tmp_path: Path) -> None:
    """Of two saves to the same path the first wins, and the second fails and names both paths."""
    target = tmp_path / "ckpt"
    first, second = staged(target, "1", b"first"), staged(target, "2", b"second")
    commit.publish_staging(first, target)
    with pytest.raises(StorageError, match=rf"cannot rename {second} to {target}: .* \(ENOTEMPTY\)"):
        commit.publish_staging(second, target)
    assert (target / "data").read_bytes() == b"first"


@pytest.mark.parametrize("exchanges", [True, False])
def test_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    """The old checkpoint's files go; all else is kept, as the same files where the file system has hard links."""
    if not exchanges:
        monkeypatch.setattr("shardckpt.storage.commit.exchange", lambda *_: False)
    target = tmp_path / "ckpt"
    (target / "folder" / "data").mkdir(parents=True)
    for name in ("data", "old", "kept", "folder/old", "folder/data/x"):
        (target / name).write_bytes(name.encode())
    (target / "dangling").symlink_to("nowhere")
    os.mkfifo(target / "pipe")
    inode = (target / "kept").stat().st_ino
    commit.replace_target(staged(target), target, {"old", "data"})
    found = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert found == {"data", "kept", "folder", "folder/old", "folder/data", "folder/data/x", "dangling", "pipe"}
    assert (target / "data").read_bytes() == b"new"
    assert (target / "folder" / "data" / "x").read_bytes() == b"folder/data/x"
    assert (target / "kept").stat().st_ino == inode
    assert (target / "dangling").readlink() == Path("nowhere")
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_new_files_win(tmp_path: Path) -> None:
    """A file that is not the old checkpoint's and has the name of a new one gives way to it."""
    target = tmp_path / "ckpt"
    target.mkdir()
    (target / "data").write_bytes(b"somebody's")
    commit.replace_target(staged(target), target, set())
    assert (target / "data").read_bytes() == b"new"


def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are no hard links, other files are copied, and the copies are durable."""

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    synced: list[bytes] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}")
        synced.extend([path.read_bytes()] if path.is_file() else [])
        fsync(fd)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", watched)
    target = tmp_path / "ckpt"
    target.mkdir()
    (target / "kept").write_bytes(b"kept")
    (target / "link").symlink_to("kept")
    commit.replace_target(staged(target), target, set())
    assert (target / "kept").read_bytes() == b"kept"
    assert (target / "link").readlink() == Path("kept")
    assert synced == [b"kept"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_staging_directory_is_committed_or_removed(tmp_path: Path, fails: bool) -> None:
    """What the block commits is the target; of what it does not commit, raise or return, nothing remains."""
    target = tmp_path / "ckpt"
    with commit.staging_directory(target) as staging:
        (staging / "data").write_bytes(b"old")
        commit.commit_staging(staging, target, list, overwrite=False)
    with contextlib.suppress(KeyError), commit.staging_directory(target) as staging:
        (staging / "data").write_bytes(b"new")
        if fails:
            raise KeyError
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert (target / "data").read_bytes() == b"old"


def test_a_commit_replaces_only_what_it_may(tmp_path: Path) -> None:
    """A target that is there when a save commits is refused without overwrite; with it, other files in it stay."""
    target = tmp_path / "ckpt"
    target.mkdir()
    for name in ("data", "other"):
        (target / name).write_bytes(b"old")
    staging = staged(target)
    for check in (commit.check_target, partial(commit.commit_staging, staging, list_owned=lambda: {"data"})):
        with pytest.raises(StorageError, match=f"{target} is not empty: .* overwrite=True"):
            check(target=target, overwrite=False)
    commit.check_target(target, overwrite=True)
    commit.commit_staging(staging, target, lambda: {"data"}, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {"data": b"new", "other": b"old"}


def test_is_free(tmp_path: Path) -> None:
    """Nothing and an empty directory are free, a directory with anything in it is not, a file is an error."""
    target = tmp_path / "ckpt"
    assert commit.is_free(target)
    target.mkdir()
    assert commit.is_free(target)
    (target / ".hidden").touch()
    assert not commit.is_free(target)
    with pytest.raises(StorageError, match="is not a directory: give another path"):
        commit.is_free(target / ".hidden")


def test_discard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Discarding removes a staging directory; what cannot be removed is reported, not raised."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EBUSY, "it is in use")

    commit.discard_staging(staged(tmp_path / "ckpt"))
    assert list(tmp_path.iterdir()) == []
    staging = staged(tmp_path / "ckpt")
    monkeypatch.setattr(os, "rmdir", fail)
    commit.discard_staging(staging)
    assert "cannot remove" in caplog.text
    assert "it is in use" in caplog.text
    assert list(tmp_path.iterdir())


def test_replaced_of(tmp_path: Path) -> None:
    """A checkpoint that an interrupted overwrite moved aside is found."""
    aside = tmp_path / ".ckpt.shardckpt-replaced-1"
    aside.mkdir()
    (tmp_path / discarded_name(aside.name)).mkdir()
    assert commit.list_replaced_checkpoints(tmp_path / "ckpt") == [aside]
    assert commit.is_staging(aside)
