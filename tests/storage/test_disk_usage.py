"""The bytes and times of files and directories."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.storage.disk_usage import freed_bytes

if TYPE_CHECKING:
    from pathlib import Path


def test_bytes_that_a_removal_frees(tmp_path: Path) -> None:
    """Files that have another name stay on the disk, and do not count."""
    path = tmp_path / "ckpt"
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "more").write_bytes(b"1234")
    (tmp_path / "kept").write_bytes(b"12345678")
    (path / "link").hardlink_to(tmp_path / "kept")
    assert freed_bytes(path) == len(b"1234")
