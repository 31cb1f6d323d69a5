"""What the tests of stream share."""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from shardckpt.storage import stream
from shardckpt.storage.digest import SMALL_RECORD, Segments, digest_function, preferred
from shardckpt.storage.writer import CheckpointWriter
from tests.faults.disks import small_disk

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.manifest import FileRecord

DIGEST = digest_function(preferred())
MIB = 1 << 20
Records = list[list[memoryview]]


@pytest.fixture(
    params=[pytest.param("disk", marks=pytest.mark.ci), "switched off", pytest.param("tmpfs", marks=pytest.mark.ci)]
)
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of every kind: on a disk that takes direct writes, on any without them, in memory."""
    if request.param == "switched off":
        monkeypatch.setenv("SHARDCKPT_DIRECT_IO", "0")
        return tmp_path
    return request.getfixturevalue(request.param)


@pytest.fixture
def tmpfs(tmp_path: Path) -> Any:
    """A directory in memory."""
    with small_disk(tmp_path / "tmpfs", "64m") as path:
        yield path


@pytest.fixture(params=["1", "4"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here with and without threads."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", request.param)
    return str(request.param)


class Write(NamedTuple):
    """A write that was done, and whether past the cache."""

    direct: bool
    address: int
    offset: int
    nbytes: int


def watch(
    monkeypatch: pytest.MonkeyPatch, fail: Callable[[Write, list[Write]], int | None] | None = None
) -> list[Write]:
    """Note every write; ``fail`` gives the error number of one that shall fail, or None, or minus the bytes it does."""
    call, lock = os.pwritev, threading.Lock()
    done: list[Write] = []

    def watched(fd: int, views: list[memoryview], offset: int) -> int:
        direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
        view = views[0]
        place = 0 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))
        write = Write(direct, place, offset, sum(part.nbytes for part in views))
        with lock:
            found = fail(write, done) if fail else None
            done.append(write)
        if found is not None and found > 0:
            raise OSError(found, os.strerror(found))
        return call(fd, views if found is None else [view[:-found]], offset)

    monkeypatch.setattr(os, "pwritev", watched)
    return done


def save(directory: Path, files: dict[str, Records]) -> list[FileRecord]:
    """Files whose records are appended by turns, and finished in the end."""
    with CheckpointWriter(directory, 0) as writer:
        open_files = {name: writer.create(name) for name in files}
        for number in range(max(map(len, files.values()))):
            for name, records in files.items():
                if number < len(records):
                    parts = records[number]
                    open_files[name].append(sum(part.nbytes for part in parts), lambda parts=parts: parts)
        return [writer.finish(file) for file in open_files.values()]


def check(path: Path, records: Records, found: FileRecord) -> None:
    """A file is its records, and its table has their digests, cut as reading expects it."""
    content = b"".join(part for parts in records for part in parts)
    assert path.stat().st_size == found.size == len(content)
    assert path.read_bytes() == content
    table = Segments.unpack(found.segments, found.digest, found.size, preferred())
    position, lengths = 0, []
    for parts in records:
        sizes = [part.nbytes for part in parts if part.nbytes]
        if sum(sizes) <= SMALL_RECORD:
            lengths += [sum(sizes)] if sizes else []
        else:
            for size in sizes:
                step = stream.SEGMENT_BYTES if size >= stream.LARGE else size
                lengths += [min(step, size - at) for at in range(0, size, step)]
    assert list(table.lengths) == lengths
    for length, digest in zip(table.lengths, table.digests, strict=True):
        assert DIGEST(content[position : position + length]) == digest
        position += length
