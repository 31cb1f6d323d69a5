"""Files that the writer did not write: taken over with digests, or refused."""

from __future__ import annotations

import hashlib
import os
import random
from typing import TYPE_CHECKING

import pytest

from shardckpt.errors import CheckpointingException, StorageError
from shardckpt.storage.digest import SEGMENT_BYTES
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.staged_files import refuse_unrecorded
from shardckpt.storage.writer import CheckpointWriter
from tests.storage.files import manifest
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


@table("size", [0, 1, SEGMENT_BYTES, 2 * SEGMENT_BYTES + 5])
@table("algorithm", ["crc32", None])
def test_an_adopted_file_is_checked_like_any_other(tmp_path: Path, size: int, algorithm: str | None) -> None:
    """Digests of an adopted file are those of its bytes, whatever its size, and a flipped bit is found by them."""
    content = random.Random(0).randbytes(size)
    (tmp_path / "data").write_bytes(content)
    with CheckpointWriter(tmp_path, 2, sha256=True, algorithm=algorithm) as writer:
        record = writer.adopt("data", keys=7)
        assert writer.recorded_files() == [record]
    assert (record.name, record.size, record.rank, record.keys) == ("data", size, 2, 7)
    assert writer.sha256 == {"data": hashlib.sha256(content).hexdigest()}
    described = manifest(record, algorithm=algorithm)
    with CheckpointReader(tmp_path, described, verify=True) as reader:
        assert reader.read("data") == content
    if size:
        (tmp_path / "data").write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(CheckpointingException, match="data"), CheckpointReader(tmp_path, described) as reader:
            reader.read("data")


@table("name", ["absent", "folder", "link", "pipe", "../outside", "up/outside", "folder/absent"])
def test_only_regular_files_of_the_directory_are_adopted(tmp_path: Path, name: str) -> None:
    """What is no file below the directory is refused by name; a pipe without a writer does not hold it up."""
    inside = tmp_path / "staging"
    (inside / "folder").mkdir(parents=True)
    (inside / "folder" / "inner").write_bytes(b"x")
    (tmp_path / "outside").write_bytes(b"x")
    (inside / "link").symlink_to(tmp_path / "outside")
    (inside / "up").symlink_to(tmp_path)
    os.mkfifo(inside / "pipe")
    with (
        CheckpointWriter(inside, 0) as writer,
        pytest.raises(CheckpointingException, match=name.removesuffix("/outside")),
    ):
        writer.adopt(name)
    assert writer.files == []


def test_files_in_folders_are_adopted_and_missed(tmp_path: Path) -> None:
    """A file in a folder is taken over by its path; one that is not, an empty folder and a link to one are listed."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "empty").mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "a" / "b")
    for name in ("a/b/c", "a/b/d", "a/e"):
        (tmp_path / name).write_bytes(name.encode())
    with CheckpointWriter(tmp_path, 0, sha256=True) as writer:
        assert [writer.adopt(name).name for name in ("a/b/c", "a/e")] == ["a/b/c", "a/e"]
        files = writer.recorded_files()
    assert writer.sha256["a/b/c"] == hashlib.sha256(b"a/b/c").hexdigest()
    names = {file.name for file in files}
    with pytest.raises(StorageError) as caught:
        refuse_unrecorded(tmp_path, names)
    assert ": 'a/b/d', 'a/empty' (a directory), 'a/link' (a symbolic link); write" in str(caught.value)
    (tmp_path / "a" / "empty").rmdir()
    (tmp_path / "a" / "link").unlink()
    refuse_unrecorded(tmp_path, {*names, "a/b/d"})
    with pytest.raises(StorageError, match="no digests: 'a' \\(a directory\\)"):
        refuse_unrecorded(tmp_path, {"f"})


def test_all_that_is_not_recorded_is_listed(tmp_path: Path) -> None:
    """The error has every name and what it is, and of very many the first."""
    for number in range(30):
        (tmp_path / f"f{number:02}").touch()
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match=r"'a' \(a directory\), 'f00', .* and 10 more"):
        refuse_unrecorded(tmp_path, {"f29"})
    refuse_unrecorded(tmp_path, {"a", *(f"f{number:02}" for number in range(30))})
