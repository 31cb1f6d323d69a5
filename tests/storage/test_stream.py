"""How the bytes of a file get there: past the page cache or through it, in blocks and in pieces, they are the same."""

from __future__ import annotations

import errno
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import filesystem, new_file, stream
from shardckpt.storage.new_file import NewFile
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.tensors.memory import PAGE
from tests.storage.files import memory
from tests.storage.stream import MIB, Write, check, directory, save, threads, tmpfs, watch
from tests.tables import in_proof

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["directory", "threads", "tmpfs"]  # fixtures; two kinds of directories are in the CI tier


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


@pytest.mark.parametrize("number", [1, 3000])
def test_small_records_are_named_in_errors(directory: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """An error in writing a block of small records names the last one of them; any block may be the first to fail."""
    watch(monkeypatch, lambda *_: errno.EIO)

    def fill(writer: CheckpointWriter) -> None:
        file = writer.create("data")
        for n in range(number):
            file.append_small([bytes(1000)], what=f"'key{n}'")
        writer.finish(file)

    text = r"cannot write 'key\d+' and the bytes before it at offset \d+ of"
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
