"""How the bytes of a file get there: past the page cache or through it, in blocks and in pieces, they are the same."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import buffers, filesystem, new_file, stream
from shardckpt.storage.digest import SMALL_RECORD, Segments, digest_function, preferred
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.tensors.memory import PAGE
from tests.faults.disks import small_disk
from tests.resources import list_open, list_threads
from tests.storage.files import memory
from tests.tables import in_proof

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
            lengths += [min(stream.SEGMENT_BYTES, n - at) for n in sizes for at in range(0, n, stream.SEGMENT_BYTES)]
    assert list(table.lengths) == lengths
    for length, digest in zip(table.lengths, table.digests, strict=True):
        assert DIGEST(content[position : position + length]) == digest
        position += length


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which what happens in gigabytes happens in kilobytes."""
    monkeypatch.setattr(stream, "SEGMENT_BYTES", 2 * PAGE)
    monkeypatch.setattr(stream, "LARGE", 2 * PAGE)
    monkeypatch.setattr(stream, "PIECE_BYTES", 4 * PAGE)
    monkeypatch.setattr(stream, "BLOCK_BYTES", 4 * PAGE)
    for module in (stream, new_file):
        monkeypatch.setattr(module, "DIRECT_BYTES", PAGE)
    monkeypatch.setattr(new_file, "BLOCK_BYTES", 2 * PAGE)


SIZES = (0, 1, 64, 4095, 4096, 4097, 8191, 8192, 8193, 12288, 16384, 20000, 65536, 70000, 131072 + 64)


@pytest.mark.parametrize("seed", [0, 1, *in_proof(*range(2, 8))])
def test_random_mixes(directory: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Records of whatever parts, from wherever in memory, are in their files, byte for byte and digest for digest."""
    shrink(monkeypatch)
    chance = random.Random(seed)

    def record() -> list[memoryview]:
        sizes = [chance.choice(SIZES) for _ in range(chance.randrange(1, 4))]
        return [memory(size, chance.choice((0, 64, 512, 1, PAGE - 64)), chance.randrange(99)) for size in sizes]

    files = {f"f{n}": [record() for _ in range(chance.randrange(1, 30))] for n in range(4)}
    for (name, records), found in zip(files.items(), save(directory, files), strict=True):
        check(directory / name, records, found)


@pytest.mark.parametrize("remainder", [0, 64, 1])
def test_large_parts(directory: Path, remainder: int) -> None:
    """Parts of several MiB, aligned in the file and in memory or not, between small ones, and read-only ones."""
    head, tail = memory(PAGE + remainder, 0), memoryview(b"tail" * 100)
    big = memory(9 * MIB + 12345, remainder, 7)
    records = [
        [head, big, tail],
        [memoryview(b"small")],
        [memory(MIB, remainder), memory(MIB - 1, 0), memory(MIB + 1, 5)],
        [big.toreadonly()],
        [memory(300_000, 3)] * 5,
    ]
    (found,) = save(directory, {"data": records})
    check(directory / "data", records, found)


@pytest.mark.ci
def test_both_ways_give_the_same(direct_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the cache and through it: the same file with the same digests."""
    records = [[memory(100, 0), memory(5 * MIB, 64), memory(77, 0)], [memory(200_000, 0)], [memory(2 * MIB, 9)]]
    done = watch(monkeypatch)
    (one,) = save(direct_directory, {"one": records})
    assert any(write.direct for write in done)
    done.clear()
    monkeypatch.setenv("SHARDCKPT_DIRECT_IO", "0")
    (other,) = save(direct_directory, {"other": records})
    assert not any(write.direct for write in done)
    assert (one.digest, one.segments, one.size) == (other.digest, other.segments, other.size)
    assert (direct_directory / "one").read_bytes() == (direct_directory / "other").read_bytes()


@pytest.mark.parametrize("remainder", [0, 64])
@pytest.mark.ci
def test_no_copy_where_memory_lies_as_the_file_does(
    direct_directory: Path, monkeypatch: pytest.MonkeyPatch, remainder: int
) -> None:
    """A large part whose place has the remainder of its address is written from where it is, but for its ends."""
    big = memory(8 * MIB, remainder)
    address = ctypes.addressof(ctypes.c_char.from_buffer(big))
    done = watch(monkeypatch)
    save(direct_directory, {"data": [[memory(PAGE + remainder, 0), big, memory(100, 0)]]})
    own = [write for write in done if write.direct and address <= write.address < address + big.nbytes]
    assert sum(write.nbytes for write in own) >= big.nbytes - PAGE
    assert all(write.address - address == write.offset - PAGE - remainder for write in own)
    assert sum(write.nbytes for write in done if not write.direct) < 4 * PAGE


@pytest.mark.parametrize("kind", ["misaligned", "read-only"])
@pytest.mark.ci
def test_copies_where_it_does_not(direct_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A large part that lies otherwise, or whose address is not to be had, goes past the cache through blocks."""
    big = memory(8 * MIB, 64) if kind == "misaligned" else memory(8 * MIB, 0).toreadonly()
    done = watch(monkeypatch)
    (found,) = save(direct_directory, {"data": [[big]]})
    check(direct_directory / "data", [[big]], found)
    assert sum(write.nbytes for write in done if write.direct) == 8 * MIB
    assert all(write.address % PAGE == 0 for write in done)


@pytest.mark.parametrize("remainder", [0, 64])
@pytest.mark.ci
def test_a_refusal_in_the_middle(direct_directory: Path, monkeypatch: pytest.MonkeyPatch, remainder: int) -> None:
    """Where a direct write does some pages and the next is refused, what it left goes through the cache."""
    records = [[memory(6 * MIB, remainder)]]
    begun = [0]

    def fail(write: Write, _: list[Write]) -> int | None:
        begun[0] += write.direct
        return (-3 * PAGE if begun[0] == 1 else errno.EINVAL) if write.direct else None

    watch(monkeypatch, fail)
    (found,) = save(direct_directory, {"data": records})
    check(direct_directory / "data", records, found)
    assert begun[0] >= 2


@pytest.mark.ci
def test_small_records_go_in_blocks(direct_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 small records are written by a few large writes past the cache; a small file by one through it."""
    done = watch(monkeypatch)
    with CheckpointWriter(direct_directory, 0) as writer:
        file = writer.create("many")
        for _ in range(10_000):
            file.append_small([b"head", bytes(500)])
        writer.finish(file)
        assert len(done) <= 10
        assert sum(write.nbytes for write in done if write.direct) > 4 * MIB
        done.clear()
        writer.write("few", bytes(200_000))
    assert [(write.direct, write.nbytes) for write in done] == [(False, 200_000)]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("when", [0, 3])
@pytest.mark.ci
def test_direct_writes_that_are_refused(
    direct_directory: Path, monkeypatch: pytest.MonkeyPatch, code: int, when: int
) -> None:
    """A file system that refuses a direct write gets the bytes through its cache, and no further one."""
    records = [[memory(100, 0), memory(20 * MIB, 64)], [memory(3 * MIB, 100)], [memory(MIB - 5, 0)]]
    refused = watch(monkeypatch, lambda write, done: code if write.direct and len(done) >= when else None)
    (found,) = save(direct_directory, {"data": records})
    monkeypatch.undo()
    check(direct_directory / "data", records, found)
    assert sum(write.direct for write in refused) <= when + 4
    assert any(write.direct for write in refused)


@pytest.mark.ci
def test_direct_descriptors_that_are_refused(direct_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file cannot be opened for direct writes, it is written through the cache."""
    call = os.open

    def opening(path: Any, flags: int, *args: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return call(path, flags, *args, **named)

    monkeypatch.setattr(os, "open", opening)
    records = [[memory(3 * MIB, 64)], [memory(2 * MIB + 1, 0)]]
    (found,) = save(direct_directory, {"data": records})
    check(direct_directory / "data", records, found)


@pytest.mark.parametrize("most", [PAGE, 3 * PAGE, 5000, 100_001])
def test_short_writes(directory: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Writes that do a part of what was asked for, whole pages or not, are gone on with: no byte is lost."""
    shrink(monkeypatch)
    records = [[memory(100, 0), memory(200_000, 64)], [memory(100_000, 0)], [memory(33, 0)] * 3, [memory(70_000, 5)]]
    watch(monkeypatch, lambda write, done: -min(most, write.nbytes) if write.nbytes > most and len(done) % 2 else None)
    (found,) = save(directory, {"data": records})
    check(directory / "data", records, found)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_errors(directory: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """An error of any write is raised in the end, with key, offset, file and the system's reason; nothing is tried."""
    done = watch(monkeypatch, lambda write, _: code if write.offset <= 6 * MIB < write.offset + write.nbytes else None)
    big = memory(20 * MIB, 0)
    with CheckpointWriter(directory, 0) as writer:
        file = writer.create("data")
        text = rf"cannot write 'layer' at offset \d+ of {directory / 'data'}: .* \({errno.errorcode[code]}\)"
        file.append(big.nbytes, lambda: [big], what="'layer'")
        with pytest.raises(StorageError, match=text):
            writer.finish(file)
        assert writer.files == []
    assert sum(write.offset <= 6 * MIB < write.offset + write.nbytes for write in done) == 1


@pytest.mark.parametrize("code", sorted(filesystem.TRANSIENT))
def test_trouble_that_passes(directory: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Writes that fail for a moment are tried again, a few times; trouble that stays is an error."""
    monkeypatch.setattr(filesystem, "_PAUSES", (0.0, 0.0, 0.0))
    failed: dict[int, int] = {}

    def fail(write: Write, _: list[Write]) -> int | None:
        failed[write.offset] = failed.get(write.offset, 0) + 1
        return code if failed[write.offset] <= times else None

    watch(monkeypatch, fail)
    records = [[memory(100, 0), memory(5 * MIB, 64)], [memory(70_000, 0)]]
    times = 3
    (found,) = save(directory, {"data": records})
    check(directory / "data", records, found)
    times, failed = 4, {}
    with pytest.raises(StorageError, match=rf"at offset \d+ .*\({errno.errorcode[code]}\)"):
        save(directory, {"more": records})


@pytest.mark.parametrize("allocates", [True, False])
@pytest.mark.ci
def test_no_more_space_than_bytes(direct_directory: Path, monkeypatch: pytest.MonkeyPatch, allocates: bool) -> None:
    """Space that was set aside ahead is given back; where none can be set aside, files are as long all the same."""
    if not allocates:
        monkeypatch.setattr(new_file, "allocate", lambda *_: False)
    records = [[memory(3 * MIB, 64)], [memory(2 * MIB + 1, 0)], [memory(123, 0)]]
    (found,) = save(direct_directory, {"data": records})
    check(direct_directory / "data", records, found)
    assert (direct_directory / "data").stat().st_blocks * 512 <= found.size + 64 * PAGE


@pytest.mark.ci
def test_memory_is_used_again(direct_directory: Path, threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is copied on its way to the disk, few blocks of memory are taken for it, and all are given back."""
    made = []

    class Counted(buffers.Buffer):
        def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
            made.append(1)
            super().__init__(nbytes, pinned=pinned)

    monkeypatch.setattr(buffers, "Buffer", Counted)
    monkeypatch.setattr(buffers.block_pool, "_free", {False: []})
    records = [[memory(4 * MIB, 1)], [memory(500_000, 0)]] * 10
    save(direct_directory, {"data": records})
    assert 1 <= len(made) <= 2 * (int(threads) + 1) + 1
    assert len(buffers.block_pool._free[False]) == len(made)


@pytest.mark.ci
def test_abandoned_files(direct_directory: Path) -> None:
    """Files that are given up in the middle leave neither descriptors nor blocks in use."""
    for number in range(5):
        with CheckpointWriter(direct_directory, 0) as writer:
            file = writer.create(f"data{number}")
            file.append_small([b"x" * 100])
            big = memory(10 * MIB, number)
            file.append(big.nbytes, lambda big=big: [big])
    assert list_open(direct_directory) == []


@pytest.mark.parametrize("extra", [0, 8 * MIB])
@pytest.mark.ci
def test_space_that_is_kept_after_a_failure(
    direct_directory: Path, monkeypatch: pytest.MonkeyPatch, extra: int
) -> None:
    """Where setting space aside fails half-way and what there was stays, as on ext4, files are no longer for it."""
    call, needed = new_file.allocate, 12 * MIB

    def partly(fd: int, size: int) -> bool:
        return call(fd, size) and size <= needed + extra and size != needed + needed // 8

    monkeypatch.setattr(new_file, "allocate", partly)
    records = [[memory(12 * MIB, 0)], [memory(5 * MIB, 64)], [memory(2 * MIB + 1, 0)], [memory(123, 0)]]
    (found,) = save(direct_directory, {"data": records})
    check(direct_directory / "data", records, found)
    assert (direct_directory / "data").stat().st_blocks * 512 <= found.size + 64 * PAGE


@pytest.mark.parametrize("number", [1, 3000])
def test_small_records_are_named_in_errors(directory: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """An error in writing a block of small records names the last one of them; any block may be the first to fail."""
    watch(monkeypatch, lambda *_: errno.EIO)

    def fill(writer: CheckpointWriter) -> None:
        file = writer.create("data")
        for n in range(number):
            file.append_small([bytes(1000)], what=f"'key{n}'")
        writer.finish(file)

    text = r"cannot write 'key\d+' and what precedes it at offset \d+ of"
    with CheckpointWriter(directory, 0) as writer, pytest.raises(StorageError, match=text):
        fill(writer)


def test_files_in_the_page_cache_have_a_thread_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str
) -> None:
    """Of several files that one write at a time may go to, each is written by one thread, so that none waits."""
    monkeypatch.setenv("SHARDCKPT_DIRECT_IO", "0")
    writers: dict[str, set[int]] = {}
    write = NewFile.write

    def watched(self: NewFile, *args: Any) -> None:
        writers.setdefault(self.path.name, set()).add(threading.get_ident())
        write(self, *args)

    monkeypatch.setattr(NewFile, "write", watched)
    data = memoryview(bytearray(random.Random(0).randbytes(9 * MIB)))
    with CheckpointWriter(tmp_path, 0) as writer:
        files = [writer.create(f"f{n}", data.nbytes) for n in range(3)]
        for _ in range(2):
            for file in files:
                file.append(data.nbytes, lambda: [data])
        for file in files:
            writer.finish(file)
    assert all((tmp_path / f"f{n}").read_bytes() == bytes(data) * 2 for n in range(3))
    assert [len(writers[f"f{n}"]) for n in range(3)] == [1, 1, 1]
    assert len(set.union(*writers.values())) == (1 if threads == "1" else 3)


def test_a_file_alone_has_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    """Of files that are written one after the other, each is written by several threads at a time."""
    monkeypatch.setenv("SHARDCKPT_DIRECT_IO", "0")
    together, write = threading.Barrier(min(2, int(threads))), NewFile.write

    def meeting(self: NewFile, *args: Any) -> None:
        together.wait(60)
        write(self, *args)

    monkeypatch.setattr(NewFile, "write", meeting)
    monkeypatch.setattr(stream, "PIECE_BYTES", MIB)
    data = memoryview(bytearray(random.Random(0).randbytes(4 * MIB)))
    with CheckpointWriter(tmp_path, 0) as writer:
        for name in "abc":
            writer.write(name, data)
    assert all((tmp_path / name).read_bytes() == data for name in "abc")


@pytest.mark.ci
def test_an_interrupt_leaves_no_threads() -> None:
    """Ctrl-C while the threads are waited for ends them all the same."""
    pool = stream.WriterPool(2)
    interrupted = threading.Event()
    for own in (None, pool.add_file(), pool.add_file()):
        pool.start(lambda: interrupted.wait(30), own)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.set()

    def close() -> None:
        threading.Timer(0.4, interrupt).start()
        pool.close()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            close()
    finally:
        signal.signal(signal.SIGINT, before)
    while list_threads("shardckpt-write"):  # the limit of the test ends it; Python calls an interrupted join done
        time.sleep(0.01)
