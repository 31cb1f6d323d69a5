"""How the bytes of a file get there: past the page cache or through it, in blocks and in pieces, they are the same."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.storage import buffers, new_file, stream
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.tensors.memory import PAGE
from tests.resources import list_open, list_threads
from tests.storage.files import memory
from tests.storage.stream import MIB, Write, check, save, threads, watch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["threads"]  # fixtures


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
def test_copies_where_it_does_not(direct_directory: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A large part that lies otherwise, or whose address is not to be had, goes past the cache through blocks."""
    big = memory(8 * MIB, 64) if kind == "misaligned" else memory(8 * MIB, 0).toreadonly()
    done = watch(monkeypatch)
    (found,) = save(direct_directory, {"data": [[big]]})
    check(direct_directory / "data", [[big]], found)
    assert sum(write.nbytes for write in done if write.direct) == 8 * MIB
    assert all(write.address % PAGE == 0 for write in done)


@pytest.mark.parametrize("remainder", [0, 64])
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


@pytest.mark.parametrize("allocates", [True, False])
def test_no_more_space_than_bytes(direct_directory: Path, monkeypatch: pytest.MonkeyPatch, allocates: bool) -> None:
    """Space that was set aside ahead is given back; where none can be set aside, files are as long all the same."""
    if not allocates:
        monkeypatch.setattr(new_file, "allocate", lambda *_: False)
    records = [[memory(3 * MIB, 64)], [memory(2 * MIB + 1, 0)], [memory(123, 0)]]
    (found,) = save(direct_directory, {"data": records})
    check(direct_directory / "data", records, found)
    assert (direct_directory / "data").stat().st_blocks * 512 <= found.size + 64 * PAGE


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
