"""Staging directories and how they become the target."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardckpt.commit import commit
from shardckpt.commit.owner import Owner
from shardckpt.commit.staging_names import discarded_name, is_temporary
from shardckpt.errors import CheckpointReplacedError, StorageError
from tests.tables import table


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
    assert is_temporary(staging.name)
    assert not is_temporary(target.name)
    with pytest.raises(StorageError, match=rf"cannot create the staging directory {staging}: .* \(EEXIST\)"):
        commit.create_staging(target, "abc")


def test_a_file_on_the_way_is_said(tmp_path: Path) -> None:
    """Where a file has the name of a folder on the way to the target, the error names the file, and what is wrong."""
    (tmp_path / "runs").write_text("")
    with pytest.raises(StorageError, match=rf"{tmp_path}/runs is not a directory"):
        commit.create_staging(tmp_path / "runs" / "ckpt", "abc")


def test_targets_do_not_mix(tmp_path: Path) -> None:
    """A target's staging directories are its own, not those of a target whose name begins alike."""
    staging = commit.create_staging(tmp_path / "step_1", "a")
    commit.create_staging(tmp_path / "step_10", "b")
    assert commit.list_staging_directories(tmp_path / "step_1") == [staging]
    assert commit.list_staging_directories(tmp_path / "gone" / "x") == []


def test_publish(tmp_path: Path) -> None:
    """The target gets the staging directory's files, an empty directory gives way; the second save is refused."""
    for target in (tmp_path / "new", tmp_path / "empty"):
        first, second = staged(target, "1", b"first"), staged(target, "2", b"second")
        if target.name == "empty":
            target.mkdir()
        commit.publish_staging(first, target)
        with pytest.raises(StorageError, match=rf"cannot rename {second} to {target}: .* \(ENOTEMPTY\)"):
            commit.publish_staging(second, target)
        assert (target / "data").read_bytes() == b"first"
        assert {path.name for path in tmp_path.iterdir()} == {target.name, second.name}
        shutil.rmtree(tmp_path / target.name)
        shutil.rmtree(second)


@table("exchanges", [True, False])
def test_replace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    """The old checkpoint's files go; all else is kept, as the same files where the file system has hard links."""
    if not exchanges:
        monkeypatch.setattr("shardckpt.commit.commit.exchange", lambda *_: False)
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


def test_what_goes_before_it_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checkpoint to replace is gone by the exchange, the error says so, and the new one stays staged."""
    target = tmp_path / "ckpt"
    target.mkdir()
    old, staging = target.stat(), staged(target)
    monkeypatch.setattr(commit, "sync_tree", lambda _: target.rmdir())  # another process removes it
    with pytest.raises(CheckpointReplacedError, match="made from another save than it would replace"):
        commit.replace_target(staging, target, set(), old)
    assert [path.name for path in tmp_path.iterdir()] == [staging.name]
    assert (staging / "data").read_bytes() == b"new"


def test_replace_a_tree(tmp_path: Path) -> None:
    """Of a folder with old files only these go; others in it are kept, but where a new file has the name."""
    target = tmp_path / "ckpt"
    for name in ("a/old", "a/kept", "a/b/old", "c/old", "d/old", "d/e/kept", "data/old", "data/lost", "f/kept"):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(name.encode())
    (target / "a" / "link").symlink_to("b")
    (target / "c" / "empty").mkdir()
    owned = {"a/old", "a/b/old", "c/old", "d/old", "data/old"}
    assert sorted(commit.find_foreign(target, owned)) == [
        "a/kept",
        "a/link",
        "c/empty",
        "d/e",
        "d/e/kept",
        "data/lost",
        "f",
        "f/kept",
    ]
    staging = staged(target)
    (staging / "a").mkdir()
    (staging / "a" / "new").write_bytes(b"new")
    (staging / "f").mkdir()
    (staging / "f" / "kept").write_bytes(b"new")
    commit.replace_target(staging, target, owned)
    found = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_symlink() or not path.is_dir()}
    assert found == {"data", "a/new", "a/kept", "a/link", "d/e/kept", "f/kept"}
    folders = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_dir() and not path.is_symlink()}
    assert folders == {"a", "c", "c/empty", "d", "d/e", "f"}
    assert (target / "f" / "kept").read_bytes() == b"new"
    assert (target / "d" / "e" / "kept").read_bytes() == b"d/e/kept"
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_folders_are_durable_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every folder of a new checkpoint is fsynced, the inner one first, before the rename; the parent comes last."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def watched(fd: int) -> None:
        calls.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        fsync(fd)

    def renamed(*args: Any) -> None:
        calls.append("rename")
        rename(*args)

    target = tmp_path / "ckpt"
    staging = staged(target)
    (staging / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "rename", renamed)
    commit.publish_staging(staging, target)
    assert calls == ["b", "a", staging.name, "rename", tmp_path.name]


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


@table("fails", [False, True])
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


def test_what_is_in_the_way_is_said(tmp_path: Path) -> None:
    """Of a target that is not empty: a checkpoint, or the first names in it; exports are named only where one is."""
    target = tmp_path / "ckpt"
    target.mkdir()
    for names, what, is_export in [
        (("shardckpt.json", "notes.txt"), r"notes\.txt, shardckpt\.json", False),
        (("metadata.json",), "a checkpoint", False),
        (("config.json", "model.safetensors"), "a checkpoint", True),
    ]:
        for name in names:
            (target / name).touch()
        with pytest.raises(StorageError, match=f"not empty: it has {what}\\. .*overwrite=True") as raised:
            commit.check_target(target, overwrite=False)
        assert ("tokenizer" in str(raised.value)) == is_export


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
    assert is_temporary(aside.name)


def test_exchange(tmp_path: Path) -> None:
    """Two directories change places in one step; an error names both."""
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / path.name).touch()
    if not commit.exchange(one, other):
        pytest.skip("this file system cannot exchange directory entries")
    assert [path.name for path in one.iterdir()] == ["other"]
    assert [path.name for path in other.iterdir()] == ["one"]
    with pytest.raises(StorageError, match=rf"cannot exchange {one} with {tmp_path / 'gone'}: .* \(ENOENT\)"):
        commit.exchange(one, tmp_path / "gone")


def test_an_old_file_never_takes_the_place_of_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system does not say whether the new checkpoint has a name, the overwrite fails; the old one stays."""
    target = tmp_path / "ckpt"
    commit.publish_staging(staged(target, "1", b"old"), target)
    staging = staged(target, "2", b"new")
    look = Path.lstat

    def interrupt(path: Path) -> os.stat_result:
        if path == staging / "data":
            raise OSError(errno.EINTR, "Interrupted system call")
        return look(path)

    monkeypatch.setattr(Path, "lstat", interrupt)
    with pytest.raises(StorageError, match="EINTR"):
        commit.replace_target(staging, target, owned=())
    assert (target / "data").read_bytes() == b"old"
    monkeypatch.undo()
    commit.replace_target(staging, target, owned=())
    assert (target / "data").read_bytes() == b"new"


def test_a_folder_that_cannot_be_looked_at_is_an_error_of_the_family(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for staging directories names the folder and the error of the system."""

    def fail(_: Path) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "is_dir", fail)
    with pytest.raises(StorageError, match=rf"cannot list {tmp_path}: .*\(EIO\)"):
        commit.list_staging_directories(tmp_path / "ckpt")
