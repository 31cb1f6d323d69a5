from __future__ import annotations

import errno
import os
import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING

import fsspec
import pytest

from shardckpt.engine import locate
from shardckpt.plugins import get_plugin_manager
from shardckpt.storage import RemotePath
from shardckpt.storage.journal_log import FileLog, ObjectLog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def folder() -> Iterator[RemotePath]:
    """An empty folder of a store."""
    found = locate("memory://journals/run", get_plugin_manager())
    assert isinstance(found, RemotePath)
    yield found
    fsspec.filesystem("memory").rm("/journals", recursive=True)


def test_lines_on_a_store_are_read_at_the_same_time(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes on reads several lines of a journal at a time, and has them in their order."""
    log, lines = ObjectLog(folder), [{"number": number} for number in range(4)]
    for line in lines:
        log.append(line)
    met, read = threading.Barrier(len(lines), timeout=60), RemotePath.read_into

    def wait(path: RemotePath, buffer: memoryview, offset: int) -> int:
        met.wait()
        return read(path, buffer, offset)

    monkeypatch.setattr(RemotePath, "read_into", wait)
    again = ObjectLog(folder)
    assert again.read() == lines
    assert again.names == log.names


def test_lines_on_a_store_are_read_in_the_callers_context(folder: RemotePath, monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that read a journal see what the caller has set, such as a bound of the attempts of a request."""
    asked: ContextVar[str] = ContextVar("asked", default="")
    log = ObjectLog(folder)
    for number in range(3):
        log.append({"number": number})
    seen, read = [], RemotePath.read_into

    def look(path: RemotePath, buffer: memoryview, offset: int) -> int:
        seen.append(asked.get())
        return read(path, buffer, offset)

    monkeypatch.setattr(RemotePath, "read_into", look)
    asked.set("by the caller")
    ObjectLog(folder).read()
    assert seen == ["by the caller"] * 3


def test_an_incomplete_line_does_not_count(folder: RemotePath) -> None:
    """A journal on a store ends before a line that is incomplete; lines behind it never count again."""
    log = ObjectLog(folder)
    for number in range(5):
        log.append({"number": number})
    (folder / log.names[2]).write(b"half")
    again = ObjectLog(folder)
    assert again.read() == [{"number": 0}, {"number": 1}]
    assert again.go_on({})
    again.append({"number": 9})
    assert ObjectLog(folder).read() == [{"number": 0}, {"number": 1}, {"number": 9}]


def test_a_file_server_that_fails_at_the_close_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends a save may close its journal: the error that ended it is told, and no later one."""
    log = FileLog(tmp_path)
    log.begin()
    close = os.close

    def fail(descriptor: int) -> None:
        close(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "close", fail)
    log.close()
    log.close()
