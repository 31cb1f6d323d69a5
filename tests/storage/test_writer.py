"""Writing: records in their places, digests of what was meant, errors from wherever they come."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import weakref
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardckpt.errors import CorruptCheckpointError, PluginError, StorageError
from shardckpt.storage.digest import Segments, digest_function, preferred
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.tensors import LARGE
from tests.resources import list_open, list_threads
from tests.storage.files import write
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.storage import FileWriter

THREADS = ("1", "4")
DIGEST = digest_function(preferred())


@pytest.fixture(params=THREADS, autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test here with and without threads."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", request.param)
    return str(request.param)


def segments_of(text: str, root: str, size: int) -> list[tuple[int, int]]:
    """(length, digest) of a record's table."""
    table = Segments.unpack(text, root, size, preferred())
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
    expected = [(len(record), DIGEST(record)) for record in whole if record]
    assert segments_of(found.segments, found.digest, found.size) == expected


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
    assert segments_of(found.segments, found.digest, found.size) == [(5, DIGEST(b"truth"))]


@table("nbytes", [10, LARGE])
def test_nothing_is_written_after_a_failure(tmp_path: Path, nbytes: int) -> None:
    """Once a record has failed, append and finish raise its error, none is asked for its bytes, no file is there."""
    asked: list[int] = []

    def fail() -> list[memoryview]:
        raise RuntimeError("the device is lost")

    def give() -> list[memoryview]:
        asked.append(1)
        return [memoryview(bytes(10))]

    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.create("data")
        with pytest.raises(RuntimeError, match="the device is lost"):
            file.append(nbytes, fail)
        with pytest.raises(RuntimeError, match="the device is lost"):
            file.append(10, give)
        with pytest.raises(RuntimeError, match="the device is lost"):
            file.append_small([b"x"])
        with pytest.raises(RuntimeError, match="the device is lost"):
            writer.finish(file)
        assert writer.files == []
        assert writer.sha256 == {}
    assert asked == []


@table("nbytes", [10, LARGE])
def test_parts_are_bytes_of_any_kind(tmp_path: Path, nbytes: int) -> None:
    """A small record takes bytes, a bytearray or a memoryview, and so does a large one."""
    for number, kind in enumerate((bytes, bytearray, memoryview)):
        with CheckpointWriter(tmp_path, 0) as writer:
            file = writer.create(f"data{number}")
            file.append(nbytes, lambda kind=kind: [kind(b"x" * nbytes)])
            writer.finish(file)
        assert (tmp_path / f"data{number}").read_bytes() == b"x" * nbytes


@table("nbytes", [10, LARGE])
def test_record_of_another_size(tmp_path: Path, nbytes: int) -> None:
    """A producer that gives more or fewer bytes than announced is an error with file, offset and both numbers."""
    for given_bytes in (nbytes - 1, nbytes + 1):
        with CheckpointWriter(tmp_path, 0) as writer:
            file = writer.create(f"data{given_bytes}")
            file.append(5, lambda: [memoryview(bytes(5))])
            text = f"data{given_bytes}: a record at offset 5 was announced with {nbytes} bytes, has {given_bytes}"
            with pytest.raises(StorageError, match=text):
                file.append(nbytes, lambda count=given_bytes: [memoryview(bytes(count))])
            with pytest.raises(StorageError, match=text):
                writer.finish(file)


@table("call", ["pwritev", "fsync"])
def test_error_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """A failing write or fsync is an error that names the file, and no record of a complete file."""

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.create("data")
        monkeypatch.setattr(os, call, failing)
        file.append(LARGE, lambda: [memoryview(bytes(LARGE))], what="'layer'")
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
    before = list_threads()
    for number in range(10):
        with CheckpointWriter(tmp_path, 0) as writer:
            writer.write(f"whole{number}", b"x")
            writer.create(f"open{number}").append(LARGE, lambda: [memoryview(bytes(LARGE))])
    assert list_open(tmp_path) == []
    assert list_threads() <= before


def test_names_and_twice(tmp_path: Path) -> None:
    """Names that could leave the directory are refused, as the strategy's fault, and a file is made once."""
    with CheckpointWriter(tmp_path, 0) as writer:
        with pytest.raises(
            PluginError, match=r"a strategy gives a file the name '../data': a file of a checkpoint has"
        ):
            writer.create("../data")
        writer.write("data", b"first")
        with pytest.raises(PluginError, match="a strategy writes 'data' twice: a file is written once"):
            writer.write("data", b"second")
        with pytest.raises(PluginError, match="a strategy writes 'text' of a str: give bytes"):
            writer.write("text", "third")  # type: ignore[arg-type]
        (tmp_path / "other").touch()
        with pytest.raises(StorageError, match=r"cannot create .*other: .* \(EEXIST\)"):
            writer.write("other", b"")
        assert [file.name for file in writer.files] == ["data"]
    assert (tmp_path / "data").read_bytes() == b"first"


def test_bytes_that_are_not_in_order_are_refused(tmp_path: Path) -> None:
    """A transposed array or a view with steps is the strategy's fault, by name, and leaves no file."""
    with CheckpointWriter(tmp_path, 0) as writer:
        for data in (np.zeros((2, 3)).T, memoryview(b"abcd")[::2]):
            with pytest.raises(PluginError, match=r"a strategy writes 'data' of a .* not in order: give a contiguous"):
                writer.write("data", data)
        assert writer.write("data", np.ascontiguousarray(np.zeros((2, 3)).T).data).size == 48
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@table("call", ["create", "adopt", "write"])
@table("name", ["", "a//b", "../b", "/tmp/b", "a\\b", "a\0b", "C:/b", "a/" + "x" * 256])
def test_a_bad_name_is_the_strategys_fault(tmp_path: Path, call: str, name: str) -> None:
    """The error names the strategy and the name, and says the rule; nothing is created, and it is no damage."""
    with CheckpointWriter(tmp_path / "staging", 0, author="('tree', 1) tests.Save") as writer:
        with pytest.raises(PluginError, match=r"^\('tree', 1\) tests.Save gives .* letters, digits") as caught:
            getattr(writer, call)(name, *([b"x"] if call == "write" else []))
        assert repr(name)[:300] in str(caught.value)
        assert not isinstance(caught.value, CorruptCheckpointError)
    assert not list(tmp_path.iterdir())


def test_files_in_folders(tmp_path: Path) -> None:
    """Files are created in folders by their paths, and recorded by them; what the commit writes is no folder, too."""
    with CheckpointWriter(tmp_path, 0, sha256=True) as writer:
        first, second = writer.begin("a/b/c", b"first"), writer.begin("a/d", b"second")
        with pytest.raises(StorageError, match=r"cannot create the folder .*/a/d: .* \(EEXIST\)"):
            writer.create("a/d/e")
        with pytest.raises(StorageError, match=r"cannot create .*/a/b: .* \(EEXIST\)"):
            writer.create("a/b")
        with pytest.raises(StorageError, match=r"not finished: 'a/b/c', 'a/d'"):
            writer.recorded_files()
        assert [writer.finish(file).name for file in (first, second)] == ["a/b/c", "a/d"]
        assert [file.name for file in writer.recorded_files()] == ["a/b/c", "a/d"]
        assert writer.sha256 == {
            name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in ("a/b/c", "a/d")
        }
        (tmp_path / "a" / "b" / "c").write_bytes(b"firs")
        with pytest.raises(StorageError, match=r"'a/b/c' had 5 bytes, and has 4"):
            writer.recorded_files()
    with CheckpointWriter(tmp_path, 0, author="('tree', 1) tests.Save") as writer:
        writer.write("shardckpt.json/x", b"")
        with pytest.raises(
            PluginError, match=r"\('tree', 1\) tests.Save has written 'shardckpt.json/x': give it another"
        ):
            writer.recorded_files()


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


class Copy(bytearray):
    """What a producer has copied from a device: memory of which one can see that it is gone."""


@pytest.mark.parametrize("sha256", [False, True])
@pytest.mark.parametrize("size", [LARGE, 5 * LARGE + 3])
def test_few_records_exist_at_a_time(tmp_path: Path, threads: str, size: int, sha256: bool) -> None:
    """However many records are appended to however many files, copies of one more than the threads exist at a time."""
    lock, living, most = threading.Lock(), [0], [0]

    def gone() -> None:
        with lock:
            living[0] -= 1

    def produce() -> list[memoryview]:
        copy = Copy(size)
        weakref.finalize(copy, gone)
        with lock:
            living[0] += 1
            most[0] = max(most[0], living[0])
        return [memoryview(copy)]

    with CheckpointWriter(tmp_path, 0, sha256=sha256) as writer:
        files = [writer.create(name) for name in ("a", "b", "c")]
        for _ in range(5):
            for file in files:
                file.append(size, produce)
        assert [writer.finish(file).size for file in files] == [5 * size] * 3
    assert living == [0]
    assert 1 <= most[0] <= int(threads) + 1


def test_ready_parts(tmp_path: Path) -> None:
    """append_small writes what append writes, of any size, and says the same."""
    records = [[b"head", bytes([n]) * size, b"tail"] for n, size in enumerate((0, 3, 5000, 70_000, LARGE + 1, 1))]
    expected = write(tmp_path, "one", records)
    for sha256 in (False, True):
        name = f"other{sha256}"
        with CheckpointWriter(tmp_path, 3, sha256=sha256) as writer:
            file = writer.create(name)
            places = [file.append_small([parts[0], memoryview(parts[1]), parts[2]]) for parts in records]
            found = writer.finish(file)
        assert (tmp_path / name).read_bytes() == (tmp_path / "one").read_bytes()
        assert places == [sum(len(b"".join(parts)) for parts in records[:n]) for n in range(len(records))]
        assert (found.size, found.keys) == (expected.size, expected.keys)
        content = (tmp_path / name).read_bytes()
        position = 0
        for length, digest in segments_of(found.segments, found.digest, found.size):
            assert DIGEST(content[position : position + length]) == digest
            position += length


@table("sha256", [False, True])
@table("sizes", [(3, 0, 5000, 64 << 10, 1), (3, 70_000, 1), (1000,) * 3000, ()])
def test_records_by_one_call(tmp_path: Path, *, sha256: bool, sizes: tuple[int, ...]) -> None:
    """append_each writes what append_small writes for each record, with the same digests: one of each small record."""
    records = [bytes([n % 251]) * size for n, size in enumerate(sizes)]
    with CheckpointWriter(tmp_path, 0, sha256=sha256) as writer:
        single, each = writer.create("single"), writer.create("each")
        for file in (single, each):
            file.append_small([b"head"])
        for record in records:
            single.append_small([record])
        each.append_each(list(map(memoryview, records)), [f"key{n}" for n in range(len(records))])
        assert each.position == single.position
        expected, found = writer.finish(single), writer.finish(each)
        hashes = writer.sha256
    assert (tmp_path / "each").read_bytes() == b"".join([b"head", *records]) == (tmp_path / "single").read_bytes()
    assert found.model_copy(update={"name": "single"}) == expected
    assert not sha256 or hashes["each"] == hashes["single"]


@pytest.mark.parametrize("algorithm", ["crc32", "xxh3_64"])
def test_the_algorithm_that_is_asked_for(tmp_path: Path, algorithm: str) -> None:
    """Digests are of the algorithm that all ranks agreed on, whatever this one prefers."""
    if algorithm != "crc32":
        pytest.importorskip("xxhash")
    with CheckpointWriter(tmp_path, 0, algorithm=algorithm) as writer:
        found = writer.write("data", b"abc")
    table = Segments.unpack(found.segments, found.digest, 3, algorithm)
    assert list(table.digests) == [digest_function(algorithm)(b"abc")]


@table("nbytes", [10, LARGE])
def test_no_sha256_of_a_file_that_failed(tmp_path: Path, nbytes: int) -> None:
    """A record that fails fails the file as without hashes, and its threads end."""
    before = list_threads()

    def fail() -> list[memoryview]:
        raise RuntimeError("the device is lost")

    with CheckpointWriter(tmp_path, 0, sha256=True) as writer:
        file = writer.create("data")
        file.append(LARGE, lambda: [memoryview(bytes(LARGE))])
        file.append(nbytes, fail)  # in the thread that hashes
        with pytest.raises(RuntimeError, match="the device is lost"):
            writer.finish(file)
        writer.create("left").append(LARGE, lambda: [memoryview(bytes(LARGE))])
        assert writer.sha256 == {}
    assert list_threads() <= before


@table("sha256", [False, True])
@table("where", ["write", "reserve"])
def test_no_thread_waits_for_ever_after_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, sha256: bool
) -> None:
    """Many files that all fail between their records' parts end with the error, hashed by threads or not."""

    def failing(*_: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(NewFile, where, failing)

    first = 100 if where == "write" else 100_000  # written by the calling thread, or by another

    def complete(writer: CheckpointWriter, file: FileWriter) -> None:
        file.append(first + LARGE, lambda: [memoryview(bytearray(first)), memoryview(bytearray(LARGE))])
        writer.finish(file)

    with CheckpointWriter(tmp_path, 0, sha256=sha256) as writer:
        files = [writer.create(f"f{n}") for n in range(20)]
        for file in files:
            with pytest.raises(StorageError, match="the disk is gone"):
                complete(writer, file)


@table("sha256", [False, True])
@table("left", [0, 1])
def test_where_no_more_threads_may_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, sha256: bool
) -> None:
    """A process that may start no more threads, or one more, writes with those that there are, and writes it all."""
    call, started = threading.Thread.start, [0]
    records = [[bytes([n]) * (3 * LARGE + n)] for n in range(12)]

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("shardckpt"):
            started[0] += 1
            if started[0] > left:
                raise RuntimeError("can't start new thread")
        call(thread)

    content = b"".join(part for parts in records for part in parts)
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "4")
    with monkeypatch.context() as patch, CheckpointWriter(tmp_path, 0, sha256=sha256) as writer:
        patch.setattr(threading.Thread, "start", start)
        file = writer.create("data")
        for parts in records:
            file.append(len(parts[0]), lambda parts=parts: [memoryview(parts[0])])
        writer.finish(file)
        assert not sha256 or writer.sha256["data"] == hashlib.sha256(content).hexdigest()
    assert (tmp_path / "data").read_bytes() == content
    assert started[0] > left


def test_small_records_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small record that fails in the caller's thread fails the file: no later record is taken."""

    def failing(*_: object) -> None:
        raise StorageError("the disk is gone")

    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.create("data")
        for _ in range(16):  # a block is full
            file.append_small([bytes(64 << 10)])
        monkeypatch.setattr(NewFile, "reserve", failing)
        with pytest.raises(StorageError, match="the disk is gone"):
            file.append_small([b"x"])
        monkeypatch.undo()
        for call in (
            lambda: file.append_small([b"x"]),
            lambda: file.append_each([b"x"], ["key"]),
            lambda: writer.finish(file),
        ):
            with pytest.raises(StorageError, match="the disk is gone"):
                call()
        assert writer.files == []


def test_one_of_many_records_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that cannot be written while many records are appended fails the file, and the error names a record."""
    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.create("data")
        file.append_each([bytes(64 << 10)] * 8, [f"key{n}" for n in range(8)])
        monkeypatch.setattr(os, "pwritev", _failing_write)
        with pytest.raises(StorageError, match="key7 and the bytes before it"):
            writer.finish(file)


def _failing_write(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")
