"""The small files beside the steps, while another process removes their directory."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from shardckpt.commit.small_files import SmallFiles
from shardckpt.errors import StorageError


def test_a_directory_that_another_process_removes_is_made_again(tmp_path: Path) -> None:
    """A file is written although its empty directory is removed at any moment before."""
    place = tmp_path / "holds"
    ended = threading.Event()

    def remove() -> None:
        while not ended.wait(0.0002):
            SmallFiles(place).clear()

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for number in range(60):
            SmallFiles(place).put("hold", b"%d" % number)
            assert (place / "hold").read_bytes() == b"%d" % number
            (place / "hold").unlink()
    finally:
        ended.set()
        thread.join()


def test_a_directory_that_is_removed_while_it_is_cleared_is_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may remove the directory at any moment: then there is nothing to clear, and no error."""
    monkeypatch.setattr(Path, "is_dir", lambda _: True)  # it was there when it was asked for
    SmallFiles(tmp_path / "holds").clear()


def test_a_file_and_its_directory_are_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is synced with the names above it, also where another process has just made the directory."""
    synced: list[str] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink().relative_to(tmp_path)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    for name in ("first", "second"):
        SmallFiles(tmp_path / "holds").put(name, b"1")
        assert synced[-2:] == ["holds", "."]


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    """A file or a dangling link where the directory should be is an error with its path, not an endless attempt."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*file/hold: Not a directory"):
        SmallFiles(tmp_path / "file").put("hold", b"")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"Look whether .*link is a symbolic link to nothing"):
        SmallFiles(tmp_path / "link").put("hold", b"")
