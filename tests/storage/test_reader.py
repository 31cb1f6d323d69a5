"""Reading: any range, checked by the segments that it touches, from files of the checkpoint only."""

from __future__ import annotations

import gc
import os
import random
import threading
import tracemalloc
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import CheckpointingException, CorruptCheckpointError, StorageError
from shardckpt.manifest import Manifest
from shardckpt.storage.buffers import BLOCK_BYTES
from shardckpt.storage.digest import SEGMENT_BYTES
from shardckpt.storage.directory import open_directory
from shardckpt.storage.memory_budget import REQUEST_BYTES
from shardckpt.storage.open_files import OPEN_FILES
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.spans import ElementRange, Pieces
from shardckpt.tensors import LARGE
from tests.resources import few_descriptors, list_open, watch_reads
from tests.storage.files import manifest, write
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest import FileRecord

FOREIGN = Manifest(backend="b", version=1)


@settings(deadline=None)
@given(records=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=10), data=st.data())
def test_any_range(tmp_path_factory: pytest.TempPathFactory, records: list[bytes], data: st.DataObject) -> None:
    """Any range of a file, across any segments, is what was written, into memory of the caller as well."""
    directory = tmp_path_factory.mktemp("range")
    found = write(directory, "data", [[record] for record in records])
    content = b"".join(records)
    start = data.draw(st.integers(0, len(content)))
    stop = data.draw(st.integers(start, len(content)))
    for kind in (manifest(found), FOREIGN):
        with CheckpointReader(directory, kind) as reader:
            buffer = bytearray(stop - start)
            reader.read_into("data", start, memoryview(buffer), "key")
            assert bytes(buffer) == reader.read_range("data", start, stop - start, "key") == content[start:stop]
            assert reader.read("data") == content
            assert reader.size("data") == len(content)


@settings(deadline=None)
@given(records=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=10), data=st.data())
def test_parts_of_a_range(tmp_path_factory: pytest.TempPathFactory, records: list[bytes], data: st.DataObject) -> None:
    """Parts of any range get their bytes; a damaged byte of the range is noticed, also between the parts."""
    directory = tmp_path_factory.mktemp("parts")
    found = write(directory, "data", [[record] for record in records])
    content = b"".join(records)
    cuts = data.draw(st.lists(st.integers(0, len(content)), min_size=2, max_size=8).map(sorted))
    start, stop = cuts[0], cuts[-1]
    bounds = [*pairwise(cuts)][:: data.draw(st.integers(1, 2))]
    for kind in (manifest(found), FOREIGN):
        parts = [(low, memoryview(bytearray(high - low))) for low, high in bounds]
        with CheckpointReader(directory, kind) as reader:
            assert reader.read_parts("data", start, stop, parts, "key")
        assert [bytes(memory) for _, memory in parts] == [content[low:high] for low, high in bounds]
    if start < stop:
        damaged = bytearray(content)
        damaged[data.draw(st.integers(start, stop - 1))] ^= 1
        (directory / "data").write_bytes(damaged)
        with CheckpointReader(directory, manifest(found)) as reader:
            assert not reader.read_parts("data", start, stop, parts, "key")


def test_parts_that_overlap_are_not_read(tmp_path: Path) -> None:
    """Parts that overlap in the file cannot be filled by one call, and nothing is read."""
    found = write(tmp_path, "data", [[bytes(range(12))]])
    parts = [(2, memoryview(bytearray(4))), (5, memoryview(bytearray(4)))]
    with CheckpointReader(tmp_path, manifest(found)) as reader:
        assert not reader.read_parts("data", 0, 12, parts, "key")
    assert not any(map(any, (memory for _, memory in parts)))


@table("shape", [(0, 3), (2, 0), (0,), (), (3, 4)])
def test_memory_of_any_shape_is_filled(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Memory of any shape is filled, also a 0-dim one and one without elements, as of an empty array of numpy."""
    found = write(tmp_path, "data", [[bytes(range(12))]])
    memory = np.full(shape, 255, np.uint8)
    with CheckpointReader(tmp_path, manifest(found)) as reader:
        reader.read_into("data", 0, memoryview(memory), "key")
    assert memory.tobytes() == bytes(range(memory.size))


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_ends_that_are_kept_are_what_the_file_has(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """With ``kept_bytes``, ranges in any order, in pieces too, are those of the file; the memory is bounded."""
    directory = tmp_path_factory.mktemp("ends")
    content = random.Random(0).randbytes(2 * SEGMENT_BYTES + 5000)
    found = write(directory, "data", [[content], [b"small"], [content[:70_000]]])
    whole = content + b"small" + content[:70_000]
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=6).map(lambda some: sorted({0, *some, len(whole)})))
    ranges = data.draw(st.permutations(list(pairwise(cuts)))) if data.draw(st.booleans()) else [*pairwise(cuts)]
    with CheckpointReader(directory, manifest(found), kept_bytes=2 * BLOCK_BYTES) as reader:
        for start, stop in ranges:
            if data.draw(st.booleans()):
                assert reader.read_range("data", start, stop - start, "key") == whole[start:stop]
                continue
            got = bytearray(stop - start)

            def take(place: int, memory: memoryview, start: int = start, got: bytearray = got) -> None:
                low, high = max(place, start), min(place + memory.nbytes, start + len(got))
                if low < high:
                    got[low - start : high - start] = memory[low - place : high - place]

            reader.read_pieces(Pieces("data", ElementRange(0, len(whole)), [(start, stop)], "key"), take)
            assert bytes(got) == whole[start:stop]
        assert reader._ends is not None
        assert len(reader._ends._ends) <= 2


def test_an_end_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that follow each other read each segment once, and a damaged one is an error that keeps nothing."""
    content = random.Random(0).randbytes(3 * SEGMENT_BYTES)
    found = write(tmp_path, "data", [[content]])
    reads = watch_reads(monkeypatch)
    step = SEGMENT_BYTES // 3 * 2
    with CheckpointReader(tmp_path, manifest(found), kept_bytes=1) as reader:
        parts = [
            reader.read_range("data", low, min(step, len(content) - low), "key") for low in range(0, len(content), step)
        ]
    assert b"".join(parts) == content
    assert sum(read.nbytes for read in reads) == len(content)
    damaged = bytearray(content)
    damaged[SEGMENT_BYTES - 1] ^= 1
    (tmp_path / "data").write_bytes(damaged)
    with CheckpointReader(tmp_path, manifest(found), kept_bytes=1) as reader:
        for low in (0, 10):
            with pytest.raises(CorruptCheckpointError, match="key: bytes 0 to"):
                reader.read_range("data", low, 10, "key")


@table("place", [0, 3000, SEGMENT_BYTES - 1, SEGMENT_BYTES + 4000])
def test_a_part_of_a_segment_is_checked_with_the_rest_of_it(tmp_path: Path, place: int) -> None:
    """Any part of a large segment is read in place, and damage outside of it, in the same segment, is found."""
    content = random.Random(0).randbytes(LARGE + 5000)
    found = write(tmp_path, "data", [[content]])
    damaged = bytearray(content)
    damaged[place] ^= 1
    in_first = place < SEGMENT_BYTES
    for start, stop in ((0, 10), (4000, 9000), (SEGMENT_BYTES - 5, SEGMENT_BYTES), (4000, SEGMENT_BYTES + 100)):
        (tmp_path / "data").write_bytes(content)
        with CheckpointReader(tmp_path, manifest(found)) as reader:
            assert reader.read_range("data", start, stop - start, "key") == content[start:stop]
        (tmp_path / "data").write_bytes(damaged)
        with CheckpointReader(tmp_path, manifest(found)) as reader:
            if in_first or stop > SEGMENT_BYTES:
                with pytest.raises(CorruptCheckpointError, match=r"key: bytes \d+ to \d+ of .*digest differs"):
                    reader.read_range("data", start, stop - start, "key")
            else:
                assert reader.read_range("data", start, stop - start, "key") == content[start:stop]


def test_blocks_are_the_whole_file_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks follow each other from the first byte to the last, no byte is read twice, and damage ends them."""
    whole = [bytes([n]) * size for n, size in enumerate((100, 3 * SEGMENT_BYTES + 5, REQUEST_BYTES + 77, 9))]
    found = write(tmp_path, "data", [[part] for part in whole])
    content = b"".join(whole)
    reads = watch_reads(monkeypatch)
    for kind in (FOREIGN, manifest(found)):
        reads.clear()
        pieces = [bytes(block) for block in CheckpointReader(tmp_path, kind, verify=True).blocks("data")]
        assert b"".join(pieces) == content
        assert max(map(len, pieces)) <= REQUEST_BYTES
        assert sum(read.nbytes for read in reads) == len(content)
    (tmp_path / "data").write_bytes(content[:-1] + b"!")
    blocks = CheckpointReader(tmp_path, manifest(found), verify=True).blocks("data")
    sound = [len(next(blocks)) for _ in pieces[:-1]]
    assert 0 < sum(sound) < len(content)
    with pytest.raises(CorruptCheckpointError, match="digest differs"):
        next(blocks)


@settings(deadline=None)
@given(records=st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=10), data=st.data())
def test_only_touched_segments_matter(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], data: st.DataObject
) -> None:
    """A flipped bit is an error for every range that touches its segment, and for no other."""
    directory = tmp_path_factory.mktemp("flip")
    found = write(directory, "data", [[record] for record in records])
    content = bytearray(b"".join(records))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    (directory / "data").write_bytes(content)
    low = 0
    with CheckpointReader(directory, manifest(found), verify=True) as reader:
        for record in records:
            high = low + len(record)
            for start, nbytes in ((low, len(record)), (high - 1, 1)):
                if low <= place < high:
                    text = f"key: bytes {low} to {high} of {directory / 'data'} are not those that were written"
                    with pytest.raises(CorruptCheckpointError, match=text):
                        reader.read_range("data", start, nbytes, "key")
                else:
                    assert reader.read_range("data", start, nbytes, "key") == content[start : start + nbytes]
            low = high


@pytest.fixture
def file(tmp_path: Path) -> FileRecord:
    """A file of two records."""
    return write(tmp_path, "data", [[b"first"], [b"second"]])


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 12), (11, 1), (1 << 62, 1), (0, 1 << 62), (5, -1)])
@pytest.mark.parametrize("foreign", [False, True])
def test_ranges_outside(tmp_path: Path, file: FileRecord, foreign: bool, offset: int, nbytes: int) -> None:
    """A range outside the file is refused before memory is taken, with key, range, file and size."""
    with CheckpointReader(tmp_path, FOREIGN if foreign else manifest(file)) as reader:
        text = f"key: bytes {offset} to {offset + nbytes} are outside {tmp_path / 'data'} of 11 bytes"
        with pytest.raises(CorruptCheckpointError, match=text):
            reader.read_range("data", offset, nbytes, "key")


def test_files_of_another_size(tmp_path: Path, file: FileRecord) -> None:
    """A file that is longer or shorter than what was written is refused when it is opened, again and again."""
    for content in (b"", b"firstsecon", b"firstsecond+"):
        (tmp_path / "data").write_bytes(content)
        with CheckpointReader(tmp_path, manifest(file)) as reader:
            for _ in range(2):
                text = rf"data: it has {len(content)} bytes, 11 were written: it was cut, or changed"
                with pytest.raises(CorruptCheckpointError, match=text):
                    reader.read("data")


def test_several_files_of_other_sizes(tmp_path: Path, file: FileRecord) -> None:
    """Only where more than one file has another size, the error speaks of another library's save."""
    (tmp_path / "data").write_bytes(b"first")
    (tmp_path / "more").write_bytes(b"firstsecond")
    files = file, file.model_copy(update={"name": "more"})
    for is_other in (False, True):
        with (
            CheckpointReader(tmp_path, manifest(*files)) as reader,
            pytest.raises(CorruptCheckpointError, match="it has 5 bytes") as caught,
        ):
            reader.read("data")
        assert ("another library has saved" in str(caught.value)) == is_other
        (tmp_path / "more").write_bytes(b"second")


def test_files_outside_the_checkpoint(tmp_path: Path, file: FileRecord) -> None:
    """Only the files that shardckpt.json names are read, and one that it should name and does not is an error."""
    (tmp_path / "other").write_bytes(b"x")
    with CheckpointReader(tmp_path, manifest(file)) as reader:
        assert reader.has("data")
        assert not reader.has("gone")
        with pytest.raises(CorruptCheckpointError, match=f"{tmp_path / 'other'} exists, but shardckpt.json does not"):
            reader.has("other")
        with pytest.raises(CorruptCheckpointError, match="other is asked for and not one of the files"):
            reader.read("other")
        for name in ("../data", "/etc/hostname", ".."):
            with pytest.raises(CorruptCheckpointError, match="not allowed"):
                reader.read(name)
            with pytest.raises(CorruptCheckpointError, match="not allowed"):
                reader.has(name)


@table("held", [False, True])
def test_files_in_folders(tmp_path: Path, held: bool) -> None:
    """A file in a folder is read by its path, where no folder on the way is a link; a folder is no file."""
    found = write(tmp_path, "a/b/data", [[b"first"], [b"second"]])
    with CheckpointReader(open_directory(tmp_path) if held else tmp_path, manifest(found), verify=True) as reader:
        assert reader.has("a/b/data")
        assert not reader.has("a/b")
        assert not reader.has("a")
        assert not reader.has("a/b/other")
        assert reader.read("a/b/data") == b"firstsecond"
        for name in ("a/b", "a/b/../b/data", "a//b/data"):
            with pytest.raises(CorruptCheckpointError):
                reader.read(name)
        (tmp_path / "a/b/other").touch()
        with pytest.raises(CorruptCheckpointError, match=r"a/b/other exists, but shardckpt.json does not name it"):
            reader.has("a/b/other")
    (tmp_path / "a").rename(tmp_path / "elsewhere")
    (tmp_path / "a").symlink_to("elsewhere")
    with CheckpointReader(open_directory(tmp_path) if held else tmp_path, manifest(found), verify=True) as reader:
        for read in (reader.read, reader.size, lambda name: next(reader.blocks(name))):
            with pytest.raises(StorageError, match=rf"cannot open {tmp_path}/a: it is a symbolic link"):
                read("a/b/data")


def test_foreign_files(tmp_path: Path, file: FileRecord) -> None:
    """Without shardckpt.json a file belongs to the checkpoint if it is there, whatever it is, and is read unchecked."""
    (tmp_path / "data").write_bytes(b"FIRSTsecond")
    (tmp_path / "folder").mkdir()
    with CheckpointReader(tmp_path, FOREIGN) as reader:
        assert reader.has("data")
        assert reader.has("folder")
        assert not reader.has("gone")
        assert reader.read("data") == b"FIRSTsecond"
        with pytest.raises(CorruptCheckpointError, match="folder is not a regular file"):
            reader.read("folder")
        with pytest.raises(StorageError, match=r"cannot open .*gone: .* \(ENOENT\): it is missing; restore it"):
            reader.read("gone")


def test_checking_can_be_switched_off(tmp_path: Path, file: FileRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARDCKPT_VERIFY_READS=0 reads without checking; verify=True checks all the same."""
    (tmp_path / "data").write_bytes(b"FIRSTsecond")
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    with CheckpointReader(tmp_path, manifest(file)) as reader:
        assert reader.read("data") == b"FIRSTsecond"
    with CheckpointReader(tmp_path, manifest(file), verify=True) as reader, pytest.raises(CorruptCheckpointError):
        reader.read("data")


def test_digests_tell_what_is_there(tmp_path: Path) -> None:
    """Bytes with a digest of their own are known without a read; others are not, nor any where nothing is checked."""
    head, tail = b"head" * 10, b"tail"
    file = write(tmp_path, "a", [[head], [tail]])
    (tmp_path / "a").write_bytes(b"x" * file.size)
    for verify in (True, False):
        with CheckpointReader(tmp_path, manifest(file), verify=verify) as reader:
            assert reader.is_known("a", 0, head) is verify
            assert reader.is_known("a", len(head), tail) is verify
            assert not reader.is_known("a", 0, head[:-1] + b"x")
            assert not reader.is_known("a", 0, head[:-1])
            assert not reader.is_known("a", 1, head[1:])


def test_unknown_algorithm(tmp_path: Path, file: FileRecord) -> None:
    """Digests of another kind are refused with the way out, or read without checking."""
    newer = manifest(file, algorithm="blake9")
    with pytest.raises(CorruptCheckpointError, match=r"digests are 'blake9'.*SHARDCKPT_VERIFY_READS=0"):
        CheckpointReader(tmp_path, newer, verify=True)
    with CheckpointReader(tmp_path, newer, verify=False) as reader:
        assert reader.read("data") == b"firstsecond"


def test_damaged_table(tmp_path: Path, file: FileRecord) -> None:
    """A damaged table of digests is an error that names its file, and leaves no descriptor open."""
    damaged = file.model_copy(update={"digest": "0" * 64})
    with CheckpointReader(tmp_path, manifest(damaged)) as reader:
        for _ in range(5):
            with pytest.raises(CorruptCheckpointError, match=f"{tmp_path / 'data'}: the table of digests is damaged"):
                reader.read("data")
    assert list_open(tmp_path) == []


@pytest.mark.parametrize("threads", ["1", "4"])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_map(tmp_path: Path, file: FileRecord, monkeypatch: pytest.MonkeyPatch, threads: str, size: int) -> None:
    """Results come in the order of the items, and the first item's error is raised once all have ended."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", threads)
    done: list[int] = []

    def slow(number: int) -> int:
        done.append(number)
        if number in (3, 7):
            raise CheckpointingException(f"item {number}")
        return number * number

    with CheckpointReader(tmp_path, manifest(file)) as reader:
        assert reader.map(lambda n: n * n, range(50), size=lambda _: size) == [n * n for n in range(50)]
        assert reader.map(lambda n: n, [], size=lambda _: size) == []
        with pytest.raises(CheckpointingException, match="item 3"):
            reader.map(slow, range(10), size=lambda _: size)
    ended = len(done)
    assert ended >= 4
    assert len(done) == ended


@table("threads", [1, 4])
def test_more_files_than_may_be_open(tmp_path: Path, threads: int) -> None:
    """A checkpoint of thousands of ranks is read with few descriptors, by several threads, in any order."""
    records = [write(tmp_path, f"f{n}", [[bytes([n % 256]) * 10]]) for n in range(3 * OPEN_FILES)]
    with CheckpointReader(tmp_path, manifest(*records)) as reader:
        wrong: list[int] = []

        def read(first: int) -> None:
            order = [*range(first, len(records), 3), *range(first, len(records), 5)]
            wrong.extend(n for n in order if reader.read_range(f"f{n}", 2, 5, "key") != bytes([n % 256]) * 5)

        workers = [threading.Thread(target=read, args=(n,)) for n in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not wrong
        assert len(list_open(tmp_path)) <= OPEN_FILES + threads
    assert list_open(tmp_path) == []


def test_a_process_that_may_open_few_files(tmp_path: Path) -> None:
    """Two checkpoints are read, and a file is written, where the process may open fewer files than readers keep."""
    for folder in "abc":
        (tmp_path / folder).mkdir()
    records = [write(tmp_path / folder, f"f{n}", [[bytes([n])]]) for folder in "ab" for n in range(40)]
    checkpoint = manifest(*records[:40])
    with (
        few_descriptors(8),
        CheckpointReader(open_directory(tmp_path / "a"), checkpoint) as one,
        CheckpointReader(open_directory(tmp_path / "b"), checkpoint) as other,
    ):
        for n in range(40):
            assert one.read(f"f{n}") == other.read(f"f{n}") == bytes([n])
            assert write(tmp_path / "c", f"f{n}", [[bytes([n])]]).size == 1


def test_the_directory_is_closed_with_the_reader(tmp_path: Path) -> None:
    """A directory that is held open is closed when nobody reads in it any more, also where Python collects nothing."""
    record = write(tmp_path, "f", [[b"content"]])
    gc.disable()
    try:
        with CheckpointReader(open_directory(tmp_path), manifest(record)) as reader:
            assert reader.read("f") == b"content"
            assert list_open(tmp_path) != []
        del reader
        assert list_open(tmp_path) == []
    finally:
        gc.enable()


def test_many_threads_share_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that read, map and parse with one reader at a time get right bytes; what is parsed is parsed once."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", "3")
    whole = b"".join(bytes([n]) * (SEGMENT_BYTES + n) for n in range(40))
    small = write(tmp_path, "small", [[b"small"]])
    large = write(tmp_path, "large", [[whole[n : n + SEGMENT_BYTES]] for n in range(0, len(whole), SEGMENT_BYTES)])
    calls: list[str] = []
    start, asking = threading.Barrier(4), threading.Semaphore(0)
    found: list[bool] = []
    with CheckpointReader(tmp_path, manifest(large, small)) as reader:

        def parse() -> bytes:
            calls.append("large")
            for _ in range(4):
                asking.acquire()  # all are about to ask
            parts = reader.map(lambda n: reader.read_range("large", n, 9, "part"), range(64), lambda _: 1 << 20)
            return reader.parsed("inner", lambda: reader.read("small")) + b"".join(parts)

        def work(number: int) -> None:
            start.wait()
            asking.release()
            value = reader.parsed("large", parse)
            buffer = bytearray(len(whole) - number)
            reader.read_into("large", number, memoryview(buffer), "range")
            blocks = b"".join(map(bytes, reader.blocks("large")))
            found.append(value[:5] == b"small" and buffer == whole[number:] and blocks == whole)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [True] * 4
    assert calls == ["large"]


def test_no_bytes_are_cached(tmp_path: Path, file: FileRecord) -> None:
    """Each read reads the file, so that damage after the first is found by the second."""
    with CheckpointReader(tmp_path, manifest(file)) as reader:
        before = reader.read("data")
        (tmp_path / "data").write_bytes(bytes(len(before)))
        with pytest.raises(CorruptCheckpointError, match="digest differs"):
            reader.read("data")


def test_parsed_once(tmp_path: Path, file: FileRecord) -> None:
    """What is parsed is parsed once; a failure is not kept."""
    calls: list[int] = []

    def parse() -> int:
        calls.append(1)
        if len(calls) == 1:
            raise CorruptCheckpointError("not yet")
        return 5

    with CheckpointReader(tmp_path, manifest(file)) as reader:
        with pytest.raises(CorruptCheckpointError):
            reader.parsed("data", parse)
        assert [reader.parsed("data", parse) for _ in range(3)] == [5, 5, 5]
    assert len(calls) == 2


def test_a_file_that_was_replaced_meanwhile(tmp_path: Path) -> None:
    """A file that is opened again by its name and is another one by now is refused, however often it is asked for."""
    records = [write(tmp_path, f"f{n}", [[bytes([n % 256]) * 10]]) for n in range(OPEN_FILES + 2)]
    with CheckpointReader(tmp_path, manifest(*records), verify=False) as reader:
        for n in range(len(records)):
            reader.read(f"f{n}")
        before = len(list_open(tmp_path))
        (tmp_path / "other").write_bytes(b"x" * 10)
        os.utime(tmp_path / "other", (5, 5))
        (tmp_path / "other").rename(tmp_path / "f0")
        for _ in range(3):
            with pytest.raises(StorageError, match=f"{tmp_path / 'f0'}: .*something has replaced the checkpoint"):
                reader.read("f0")
        assert len(list_open(tmp_path)) == before
        assert reader.read("f1") == bytes([1]) * 10  # closed too, and opened again


def test_close_while_a_file_is_read(tmp_path: Path, file: FileRecord) -> None:
    """A reader that is closed while a thread reads keeps that thread's file open until it has read it."""
    reader = CheckpointReader(tmp_path, manifest(file))
    opened = reader._files.acquire("data")
    reader.close()
    assert os.pread(opened.input.fileno(), 5, 0) == b"first"
    reader._files.release(opened)
    assert list_open(tmp_path) == []
    assert not opened.is_open
    assert reader.read("data") == b"firstsecond"
    reader.close()
    assert list_open(tmp_path) == []


def test_what_is_read_is_not_copied(tmp_path: Path) -> None:
    """Reading a range into new bytes takes the memory of the range, not twice as much."""
    found = write(tmp_path, "data", [[bytes(range(256)) * (32 << 10)]])
    with CheckpointReader(tmp_path, manifest(found)) as reader:
        reader.read_range("data", 0, 100, "key")
        tracemalloc.start()
        try:
            assert len(reader.read("data")) == found.size
            assert tracemalloc.get_traced_memory()[1] < 1.5 * found.size
        finally:
            tracemalloc.stop()
