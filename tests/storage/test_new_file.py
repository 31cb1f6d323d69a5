"""A new file: pages past the page cache, the rest through it, space set aside, and the end of the file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage.new_file import NewFile
from tests.storage.files import memory

if TYPE_CHECKING:
    from pathlib import Path


def test_bytes_that_are_gone(tmp_path: Path) -> None:
    """A file that is shorter than what was written to it is no file of a checkpoint."""
    file = NewFile(tmp_path / "data")
    file.write(memory(1000, 0), 0)
    os.truncate(tmp_path / "data", 999)
    with pytest.raises(StorageError, match=f"{tmp_path / 'data'}: it has fewer bytes than the 1000 that were written"):
        file.finish(1000)
    file.close()
