"""The small files beside the steps, while another process removes their directory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from shardckpt.commit.small_files import put_small_file, remove_temporaries
from shardckpt.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path


def test_a_directory_that_another_process_removes_is_made_again(tmp_path: Path) -> None:
    """A file is written although its empty directory is removed at any moment before."""
    place = tmp_path / "holds"
    ended = threading.Event()

    def remove() -> None:
        while not ended.wait(0.0002):
            remove_temporaries(place)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for number in range(60):
            put_small_file(place, "hold", b"%d" % number)
            assert (place / "hold").read_bytes() == b"%d" % number
            (place / "hold").unlink()
    finally:
        ended.set()
        thread.join()


def test_what_is_no_directory_is_named(tmp_path: Path) -> None:
    """A file or a dangling link where the directory should be is an error with its path, not an endless attempt."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*file/hold: Not a directory"):
        put_small_file(tmp_path / "file", "hold", b"")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(StorageError, match=r"Look whether .*link is a symbolic link to nothing"):
        put_small_file(tmp_path / "link", "hold", b"")
