"""Writing: records in their places, digests of what was meant, errors from wherever they come."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import zlib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, StorageError
from shardckpt.storage.digest import Segments
from shardckpt.storage.writer import WORTH_A_THREAD, CheckpointWriter
from tests.storage.files import write

THREADS = ("1", "4")
LARGE = WORTH_A_THREAD


@pytest.fixture(params=THREADS, autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here with and without threads."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", request.param)
    return str(request.param)


def segments_of(text: str, root: str, size: int) -> list[tuple[int, int]]:
    """(length, digest) of a record's table."""
    table = Segments.unpack(text, root, size)
    return list(zip(table.lengths, table.digests, strict=True))


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.lists(st.binary(max_size=30), min_size=1, max_size=3), max_size=12))
def test_records_in_order(tmp_path_factory: pytest.TempPathFactory, records: list[list[bytes]]) -> None:
    """The file is its records, one after the other, and its table has one segment for each that is not empty."""
    directory = tmp_path_factory.mktemp("records")
    found = write(directory, "data", records)
    whole = [b"".join(parts) for parts in records]
    assert (directory / "data").read_bytes() == b"".join(whole)
    assert (found.name, found.rank, found.keys, found.size) == ("data", 3, len(records), len(b"".join(whole)))
    expected = [(len(record), zlib.crc32(record)) for record in whole if record]
    assert segments_of(found.segments, found.digest, found.size) == expected


def test_large_and_small_records(tmp_path: Path) -> None:
    """Records that threads write and records that the caller writes all come to their places."""
    records = [[bytes([n]) * (LARGE + 7 * n if n % 2 else 100 + n)] for n in range(20)]
    found = write(tmp_path, "data", records)
    content = b"".join(part for parts in records for part in parts)
    assert (tmp_path / "data").read_bytes() == content
    position = 0
    for length, digest in segments_of(found.segments, found.digest, found.size):
        assert digest == zlib.crc32(content[position : position + length])
        position += length
    assert position == len(content)


def test_digest_is_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that lies about what it wrote does not change the digest: it is of the memory, not of the file."""
    call = os.pwritev

    def lying(fd: int, buffers: list[memoryview], offset: int) -> int:
        total = sum(buffer.nbytes for buffer in buffers)
        call(fd, [bytes(total)], offset)
        return total

    monkeypatch.setattr(os, "pwritev", lying)
    found = write(tmp_path, "data", [[b"truth"]])
    assert (tmp_path / "data").read_bytes() == bytes(5)
    assert segments_of(found.segments, found.digest, found.size) == [(5, zlib.crc32(b"truth"))]


@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_error_in_a_producer(tmp_path: Path, nbytes: int) -> None:
    """What a producer raises is raised when the file is finished; the file is none of the checkpoint's."""

    def produce() -> list[memoryview]:
        raise RuntimeError("the device is lost")

    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.create("data")
        file.append(10, lambda: [memoryview(bytes(10))])
        file.append(nbytes, produce)
        with pytest.raises(RuntimeError, match="the device is lost"):
            writer.finish(file)
        assert writer.files == []


@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_nothing_is_written_after_a_failure(tmp_path: Path, nbytes: int) -> None:
    """Once a record has failed, the next one is refused with its error, and never asked for its bytes."""
    asked: list[int] = []
    failed = threading.Event()

    def fail() -> list[memoryview]:
        failed.set()
        raise RuntimeError("the device is lost")

    def give() -> list[memoryview]:
        asked.append(1)
        return [memoryview(bytes(10))]

    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.create("data")
        file.append(nbytes, fail)
        assert failed.wait(5)
        while not all(task.done() for task in file._tasks):
            threading.Event().wait(0.01)
        with pytest.raises(RuntimeError, match="the device is lost"):
            file.append(10, give)
    assert asked == []


@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_record_of_another_size(tmp_path: Path, nbytes: int) -> None:
    """A producer that gives more or fewer bytes than announced is an error with file, offset and both numbers."""
    for given_bytes in (nbytes - 1, nbytes + 1):
        with CheckpointWriter(tmp_path, 0) as writer:
            file = writer.create(f"data{given_bytes}")
            file.append(5, lambda: [memoryview(bytes(5))])
            file.append(nbytes, lambda count=given_bytes: [memoryview(bytes(count))])
            text = f"data{given_bytes}: a record at offset 5 was announced with {nbytes} bytes, has {given_bytes}"
            with pytest.raises(StorageError, match=text):
                writer.finish(file)


@pytest.mark.parametrize("call", ["pwritev", "fsync"])
def test_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A failing write or fsync is an error that names the file, and no record of a complete file."""

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.create("data")
        monkeypatch.setattr(os, call, failing)
        file.append(LARGE, lambda: [memoryview(bytes(LARGE))])
        with pytest.raises(StorageError, match=rf"{tmp_path / 'data'}: Input/output error \(EIO\)"):
            writer.finish(file)
        assert writer.files == []


def test_every_file_is_fsynced_once_after_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a file is finished, all its bytes were there at its one fsync."""
    sizes: list[int] = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        sizes.append(os.fstat(fd).st_size)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    write(tmp_path, "one", [[bytes(LARGE)], [bytes(3)]])
    write(tmp_path, "two", [])
    assert sizes == [LARGE + 3, 0]


def test_descriptors_and_threads_end(tmp_path: Path) -> None:
    """Neither finished nor abandoned files leave descriptors or threads."""
    descriptors, before = len(list(Path("/proc/self/fd").iterdir())), threading.active_count()
    for number in range(10):
        with CheckpointWriter(tmp_path, 0) as writer:
            writer.write(f"whole{number}", b"x")
            writer.create(f"open{number}").append(LARGE, lambda: [memoryview(bytes(LARGE))])
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    assert threading.active_count() == before


def test_names_and_twice(tmp_path: Path) -> None:
    """Names that could leave the directory are refused, and a file is made once."""
    with CheckpointWriter(tmp_path, 0) as writer:
        with pytest.raises(CorruptCheckpointError, match="not allowed"):
            writer.create("../data")
        writer.write("data", b"first")
        with pytest.raises(StorageError, match=r"cannot create .*data: .* \(EEXIST\)"):
            writer.write("data", b"second")
        assert [file.name for file in writer.files] == ["data"]
    assert (tmp_path / "data").read_bytes() == b"first"


def test_sha256_while_written(tmp_path: Path) -> None:
    """Hashes of several files at once are those of their bytes, however large and small records follow each other."""
    sizes = [10, LARGE, 0, LARGE + 1, 5, 5, 3 * LARGE, 100, LARGE, 1]
    contents = {name: [bytes([7 * n + len(name)]) * size for n, size in enumerate(sizes)] for name in ("a", "bb")}
    with CheckpointWriter(tmp_path, 0, sha256=True) as writer:
        files = {name: writer.create(name) for name in contents}
        for n in range(len(sizes)):
            for name, records in contents.items():
                half = len(records[n]) // 2
                parts = [memoryview(records[n])[:half], memoryview(records[n])[half:]]
                files[name].append(len(records[n]), lambda parts=parts: parts)
        found = {name: writer.finish(file) for name, file in files.items()}
        writer.write("small", b"abc")
        hashes = writer.sha256
    plain = {name: write(tmp_path, f"plain-{name}", [[record] for record in contents[name]]) for name in contents}
    for name, records in contents.items():
        assert (tmp_path / name).read_bytes() == b"".join(records)
        assert hashes[name] == hashlib.sha256(b"".join(records)).hexdigest()
        assert found[name].size == plain[name].size
    assert hashes.keys() == {"a", "bb", "small"}
    assert hashes["small"] == hashlib.sha256(b"abc").hexdigest()


def test_sha256_takes_one_record_after_the_other(tmp_path: Path) -> None:
    """A record is asked for when all before it are written: a file's copies from a device never pile up."""
    sizes = [LARGE, 20, LARGE, 30, 40, LARGE]
    found: list[tuple[int, int]] = []

    def produce(number: int) -> list[memoryview]:
        found.append((number, (tmp_path / "data").stat().st_size))
        return [memoryview(bytes([number]) * sizes[number])]

    with CheckpointWriter(tmp_path, 0, sha256=True) as writer:
        file = writer.create("data")
        for number, size in enumerate(sizes):
            file.append(size, lambda number=number: produce(number))
        writer.finish(file)
    assert found == [(number, sum(sizes[:number])) for number in range(len(sizes))]


@pytest.mark.parametrize("nbytes", [10, LARGE])
def test_no_sha256_of_a_file_that_failed(tmp_path: Path, nbytes: int) -> None:
    """A record that fails fails the file as without hashes, and its threads end."""
    before = threading.active_count()

    def fail() -> list[memoryview]:
        raise RuntimeError("the device is lost")

    with CheckpointWriter(tmp_path, 0, sha256=True) as writer:
        file = writer.create("data")
        file.append(LARGE, lambda: [memoryview(bytes(LARGE))])
        file.append(nbytes, fail)
        with pytest.raises(RuntimeError, match="the device is lost"):
            writer.finish(file)
        writer.create("left").append(LARGE, lambda: [memoryview(bytes(LARGE))])
        assert writer.sha256 == {}
    assert threading.active_count() == before


def test_no_sha256_unless_asked(tmp_path: Path) -> None:
    """Hashing costs what it costs only those who ask for it."""
    with CheckpointWriter(tmp_path, 0) as writer:
        writer.write("data", b"x")
        assert writer.sha256 == {}


def test_bad_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number of threads that is none is an error that names the variable."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "0")
    with pytest.raises(CheckpointingException, match="SHARDCKPT_IO_THREADS='0': expected a whole number of at least 1"):
        CheckpointWriter(tmp_path, 0)
