"""What is left beside targets: found by exact names, kept while a process may have it, removed whole."""

from __future__ import annotations

import errno
import os
import pathlib
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from shardckpt import settings
from shardckpt.commit import commit
from shardckpt.commit.leftovers import (
    create_spool,
    explain_kept,
    find_leftovers,
    find_spools,
    remove_leftover,
    remove_tree,
    remove_unused,
    walk_folders,
)
from shardckpt.commit.owner import Owner
from shardckpt.commit.staging_names import (
    REMOVED,
    REPLACED,
    STAGING,
    new_save_id,
    temporary_name,
)
from shardckpt.errors import StorageError
from shardckpt.storage.disk_usage import find_last_write
from tests.commit import owners

if TYPE_CHECKING:
    from pathlib import Path

    from tests.clock import Clock


def _all(folder: Path) -> Any:
    return find_leftovers(folder, lambda _: True)


def test_a_save_that_begins_while_others_are_cleared_away_keeps_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Garbage collection in another thread never takes a staging directory for a leftover, from the first moment on."""
    make = pathlib.Path.mkdir

    def make_and_collect(path: Path, *args: Any, **kwargs: Any) -> None:
        make(path, *args, **kwargs)
        remove_unused(_all(tmp_path))

    monkeypatch.setattr(pathlib.Path, "mkdir", make_and_collect)
    staging = commit.create_staging(tmp_path / "step-1", new_save_id())
    assert staging.is_dir()
    commit.discard_staging(staging)
    assert not list(tmp_path.iterdir())


def test_only_names_that_are_exactly_ours_are_found(tmp_path: Path) -> None:
    """Links, and names with anything before, after or within, are others'."""
    made = [owners.leave(tmp_path / "ckpt", owners.dead()), owners.leave(tmp_path / "ckpt", None)]
    for strange in (f"x{made[0].name}", f"{made[0].name}-mine", f"{made[1].name}x", made[1].name[:-1]):
        (tmp_path / strange).mkdir()
    (tmp_path / temporary_name("link", STAGING, new_save_id())).symlink_to(tmp_path / "elsewhere")
    assert {leftover.path for leftover in _all(tmp_path)} == set(made)
    assert find_leftovers(tmp_path, "ckp".__eq__) == []
    assert _all(tmp_path / "nowhere") == []


def test_what_a_living_process_has_stays(tmp_path: Path) -> None:
    """A process in the midst of a save keeps its directory until it is dead."""
    with owners.alive() as owner:
        staging = owners.leave(tmp_path / "ckpt", owner)
        (leftover,) = _all(tmp_path)
        assert leftover.path == staging
        assert explain_kept(leftover, hours=0) == f"process {owner.pid} of this host is alive"
    assert explain_kept(leftover) == ""
    remove_leftover(leftover)
    assert list(tmp_path.iterdir()) == []


def test_what_another_host_has_stays_until_it_is_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """The last write decides, by SHARDCKPT_LEFTOVER_HOURS; so it does where an older release wrote no owner."""
    for owner, whose in ((owners.elsewhere(), "another host"), (None, "an older release")):
        path = owners.leave(tmp_path / "ckpt", owner)
        os.utime(path, (1, 1))
        (leftover,) = _all(tmp_path)
        kept = explain_kept(leftover)
        assert whose in kept
        assert "written to 0.0 hours ago: it is removed after 24" in kept
        assert explain_kept(leftover, hours=0) == ""
        clock.advance(hours=25)
        assert explain_kept(leftover) == ""
        with monkeypatch.context() as patched:
            patched.setenv(settings.LEFTOVER_HOURS, "26")
            assert "it is removed after 26" in explain_kept(leftover)
        clock.advance(hours=-25)
        remove_unused([leftover])
        assert path.exists()
        remove_leftover(leftover)


def test_what_cannot_be_read_is_not_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Of another host's directory that a file system does not list now the last write is unknown: it stays."""
    path = owners.leave(tmp_path / "ckpt", owners.elsewhere())
    os.utime(path, (1, 1))
    (leftover,) = _all(tmp_path)
    clock.advance(hours=25)

    def fail(_: Path) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pathlib.Path, "iterdir", fail)
    assert "its last write is not known" in explain_kept(leftover)
    assert find_last_write(path) is None
    assert explain_kept(leftover, hours=0) == ""


def test_a_removal_that_cannot_look_again_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither the removal nor the look at what it has left succeeds, it is not reported as done."""
    (tmp_path / "left").touch()

    def fail(*_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(pathlib.Path, "unlink", fail)
    monkeypatch.setattr(os, "lstat", fail)
    monkeypatch.setattr(pathlib.Path, "lstat", fail)
    with pytest.raises(StorageError, match=rf"{tmp_path / 'left'}: .*\(EIO\)"):
        remove_tree(tmp_path / "left")


def test_what_was_moved_lately_is_not_old(tmp_path: Path) -> None:
    """An overwrite on another host moves files of last year: that it does so now is what counts."""
    aside = owners.leave(tmp_path / "ckpt", owners.elsewhere(), REPLACED)
    for path in (aside / "data", aside):
        os.utime(path, (1, 1))
    (leftover,) = _all(tmp_path)
    assert "written to 0.0 hours ago" in explain_kept(leftover)


def test_garbage_is_nobodys(tmp_path: Path) -> None:
    """What was discarded, or is of a checkpoint being removed, goes at once, whoever has begun with it."""
    for owner in (Owner.current(), owners.elsewhere(), None):
        owners.leave(tmp_path / "ckpt", owner, discarded=True)
        owners.leave(tmp_path / "ckpt", owner, REMOVED)
    assert remove_unused(_all(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_what_this_process_fills_stays_and_what_it_could_not_remove_goes(tmp_path: Path) -> None:
    """A save under way in this process keeps its directory; one that has failed, and left it, does not."""
    staging = commit.create_staging(tmp_path / "ckpt", new_save_id())
    left = owners.leave(tmp_path / "ckpt", Owner.current())
    kept = remove_unused(_all(tmp_path))
    assert [leftover.path for leftover, _ in kept] == [staging]
    assert not left.exists()
    commit.publish_staging(staging, tmp_path / "ckpt")


def test_files_are_left_too(tmp_path: Path) -> None:
    """What a conversion to one file has left goes as well."""
    path = tmp_path / temporary_name("model.bin", STAGING, new_save_id(), owners.dead())
    path.write_bytes(b"so far")
    assert remove_unused(_all(tmp_path)) == []
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system's reason stands in the log, and other leftovers go."""
    bad, good = owners.leave(tmp_path / "bad", owners.dead()), owners.leave(tmp_path / "good", owners.dead())
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source == bad:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    remove_unused(_all(tmp_path))
    assert f"cannot remove {bad}: Permission denied (EACCES)" in caplog.text
    assert bad.exists()
    assert not good.exists()


def test_two_processes_remove_at_a_time(tmp_path: Path) -> None:
    """Who comes second finds nothing, which is no error."""
    owners.leave(tmp_path / "ckpt", owners.dead())
    (leftover,) = _all(tmp_path)
    remove_leftover(leftover)
    remove_leftover(leftover)


def test_spools_of_dead_processes_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next spool directory takes the place of those of dead processes; this one's, and other names, stay."""
    monkeypatch.setenv(settings.SPOOL_DIR, str(tmp_path))
    own = create_spool()
    left = own.with_name(own.name.replace(Owner.current().text, owners.dead().text))
    far = own.with_name(own.name.replace(Owner.current().text, owners.elsewhere().text))
    older, strange = tmp_path / "shardckpt-spool-abcd_123", tmp_path / "shardckpt-spool-of-mine"
    for path in (left, far, older, strange):
        path.mkdir()
    link = tmp_path / f"shardckpt-spool-{owners.dead().text}-abcd_123"
    link.symlink_to(strange)
    second = create_spool()
    assert not left.exists()
    assert link.is_symlink()
    assert {leftover.path for leftover in find_spools(tmp_path)} == {own, second, far, older}
    assert strange.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give directories away")
def test_spools_of_other_users_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that users share, root too removes only its own."""
    monkeypatch.setenv(settings.SPOOL_DIR, str(tmp_path))
    theirs = tmp_path / f"shardckpt-spool-{owners.dead().text}-abcd_123"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    create_spool()
    assert theirs.exists()


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    """It cannot be listed, and the error names it."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=f"cannot list {tmp_path}/file"):
        _all(tmp_path / "file")


def test_a_folder_that_cannot_be_listed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others are looked into, and a warning says which was not; one that was removed meanwhile is no news."""
    kept = tmp_path / "open" / temporary_name("run", STAGING, new_save_id())
    kept.mkdir(parents=True)
    (tmp_path / "closed").mkdir()
    (tmp_path / "removed").mkdir()
    scandir = os.scandir
    errors = {"closed": PermissionError(errno.EACCES, "Permission denied"), "removed": FileNotFoundError()}

    def refuse(path: Any) -> Any:
        if error := errors.get(pathlib.Path(path).name):
            raise type(error)(*error.args, str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert walk_folders(tmp_path).with_leftovers == [tmp_path / "open"]
    (warning,) = caplog.messages
    assert warning.endswith(f"Permission denied: '{tmp_path / 'closed'}'")
