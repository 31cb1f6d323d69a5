"""A new file: pages past the page cache, the rest through it, space set aside, and the end of the file."""

from __future__ import annotations

import errno
import os
import signal
from typing import TYPE_CHECKING

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import new_file
from shardckpt.storage.new_file import NewFile
from shardckpt.tensors import PAGE
from tests.storage.files import memory

if TYPE_CHECKING:
    from pathlib import Path


MIB = 1 << 20


def test_whole_pages_only(direct_directory: Path) -> None:
    """NewFile writes pages to pages from any memory, and the rest of a page, at either end, through the cache."""
    path = direct_directory / "pages"
    file = NewFile(path)
    file.reserve(MIB)
    content = memory(40 * PAGE, 5)
    for start, stop in ((30, 20 * PAGE + 10), (20 * PAGE + 10, 20 * PAGE + 20), (20 * PAGE + 20, 40 * PAGE)):
        file.write(content[start:stop], PAGE + start)
    file.finish(41 * PAGE)
    file.close()
    assert path.read_bytes() == bytes(PAGE + 30) + bytes(content[30:])


@pytest.mark.parametrize("fails", [False, True])
def test_little_space_is_set_aside_ahead(direct_directory: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """An unfinished file has an eighth more space than its bytes at most, and no more than them after a failure."""
    call = new_file.allocate
    if fails:
        monkeypatch.setattr(new_file, "allocate", lambda fd, size: call(fd, size) and False)
    path = direct_directory / "data"
    file = NewFile(path)
    file.reserve(8 * MIB)
    assert 8 * MIB <= path.stat().st_blocks * 512 <= (8 + (not fails)) * MIB + 64 * PAGE
    file.write(memory(8 * MIB, 0), 0)
    file.finish(8 * MIB)
    file.close()
    assert path.stat().st_size == 8 * MIB


def test_a_close_that_fails(direct_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing close names the file, all descriptors are closed, and none a second time: it may be another file's."""
    path, closed, close = direct_directory / "data", list[int](), os.close

    def failing(fd: int) -> None:
        closed.append(fd)
        close(fd)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    file = NewFile(path)
    file.reserve(MIB)
    file.write(memory(MIB, 0), 0)
    file.finish(MIB)
    monkeypatch.setattr(os, "close", failing)
    with pytest.raises(StorageError, match=rf"cannot close {path}: Disk quota exceeded \(EDQUOT\)"):
        file.close()
    file.close()
    monkeypatch.undo()
    assert len(closed) == len(set(closed)) == 2


def test_a_child_of_a_busy_process_writes(tmp_path: Path) -> None:
    """A child that was forked while threads of its parent were writing has turns of its own."""
    turns = new_file._cached_writes.turns
    count = 0
    while turns.acquire(blocking=False):
        count += 1
    assert count == os.cpu_count()
    child = os.fork()
    if not child:
        signal.alarm(60)
        NewFile(tmp_path / "data").write(memoryview(b"child"), 0)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    turns.release(count)
    assert status == 0
    assert (tmp_path / "data").read_bytes() == b"child"
