"""The bytes and times of files and directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.storage.disk_usage import freed_bytes, used_bytes

if TYPE_CHECKING:
    from pathlib import Path


def test_bytes_that_a_removal_frees(tmp_path: Path) -> None:
    """Files that have a name elsewhere stay on the disk, and do not count; all names of others count once."""
    path = tmp_path / "ckpt"
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "more").write_bytes(b"1234")
    (tmp_path / "kept").write_bytes(b"12345678")
    (path / "link").hardlink_to(tmp_path / "kept")
    assert freed_bytes(path) == len(b"1234")
    (path / "same").hardlink_to(path / "deep" / "more")
    assert freed_bytes(path) == len(b"1234")
    assert used_bytes(path) == freed_bytes(path) + len(b"12345678")
    (tmp_path / "kept").unlink()
    (tmp_path / "way").symlink_to(path)
    assert freed_bytes(path) == used_bytes(path)
    assert freed_bytes(tmp_path / "way") == 0
