"""Many ranges at once: cut where digests end, read by several threads, checked, and each byte once."""

from __future__ import annotations

import errno
import itertools
import os
import random
import threading
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.manifest import Manifest
from shardckpt.storage import RangeRead, RemotePath
from shardckpt.storage.digest import SEGMENT_BYTES, Segments
from shardckpt.storage.range_reads import batch_ranges
from shardckpt.storage.reader import CheckpointReader
from tests.resources import list_threads, watch_reads
from tests.storage.files import manifest, write

if TYPE_CHECKING:
    from pathlib import Path

    from shardckpt.manifest import FileRecord

FOREIGN = Manifest(backend="b", version=1)
#: Sizes of the records of a file: some are cut into segments, some are one, and some are small.
SIZES = (100, 5 * SEGMENT_BYTES + 77, 3, 300 << 10, 12 * SEGMENT_BYTES, 64 << 10, SEGMENT_BYTES)
WHOLE = b"".join(random.Random(number).randbytes(size) for number, size in enumerate(SIZES))


@pytest.fixture
def files(tmp_path: Path) -> list[FileRecord]:
    """Two files of the same records, and a short one."""
    starts = [sum(SIZES[:number]) for number in range(len(SIZES))]
    records = [[WHOLE[start : start + size]] for start, size in zip(starts, SIZES, strict=True)]
    return [write(tmp_path, name, records) for name in ("one", "two")] + [write(tmp_path, "short", [[b"short"]])]


def _ranges(seed: int) -> list[RangeRead]:
    """Ranges of both files, ascending, of any length."""
    rng = random.Random(seed)
    found = []
    for name in ("one", "two"):
        cuts = sorted(rng.sample(range(len(WHOLE)), 2 * rng.randint(1, 8)))
        found += [
            RangeRead(name, start, memoryview(bytearray(stop - start)), f"{name} at {start}")
            for start, stop in zip(cuts[::2], cuts[1::2], strict=True)
        ]
    return found


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=20),
    most=st.integers(1, 12),
    least=st.integers(1, 12),
    shares=st.integers(1, 9),
    joined=st.booleans(),
    data=st.data(),
)
def test_batches_tile_the_ranges(
    lengths: list[int], most: int, least: int, shares: int, joined: bool, data: st.DataObject
) -> None:
    """Every byte is in one part, parts are cut where segments end, and no batch is larger than it must be."""
    segments = data.draw(st.sampled_from([None, Segments(lengths, [0] * len(lengths))]))
    size = sum(lengths)
    pairs = [sorted(data.draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for _ in range(3)]
    ranges = [RangeRead("f", low, memoryview(bytearray(high - low)), str(n)) for n, (low, high) in enumerate(pairs)]
    least = min(least, most)
    batches = list(batch_ranges(ranges, lambda _: segments, most, least, shares, joined=joined))
    parts: dict[str, list[tuple[int, int]]] = {}
    for batch in batches:
        assert batch
        assert joined or len(batch) == 1
        assert sum(part.memory.nbytes for part in batch[:-1]) < most
        for part in batch:
            parts.setdefault(part.what, []).append((part.offset, part.offset + part.memory.nbytes))
            assert segments is not None or part.memory.nbytes <= most
    ends = {sum(lengths[: n + 1]) for n in range(len(lengths))}
    for number, (low, high) in enumerate(pairs):
        if low == high:
            assert str(number) not in parts
            continue
        found = parts.get(str(number), [])
        assert [low, *(stop for _, stop in found)] == [*(start for start, _ in found), high]
        assert segments is None or all(stop in ends for _, stop in found[:-1])


@pytest.mark.parametrize("threads", ["1", "3"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_ours", [True, False])
def test_any_ranges(
    tmp_path: Path, files: list[FileRecord], monkeypatch: pytest.MonkeyPatch, seed: int, threads: str, is_ours: bool
) -> None:
    """Ranges of any length and place, of several files, with digests and without, are what was written."""
    monkeypatch.setenv("SHARDCKPT_IO_THREADS", threads)
    ranges = _ranges(seed)
    with CheckpointReader(tmp_path, manifest(*files) if is_ours else FOREIGN) as reader:
        reader.read_ranges(ranges)
        reader.read_ranges([])
    for _, offset, memory, _ in ranges:
        assert memory == WHOLE[offset : offset + memory.nbytes]


def test_a_mib_of_segments_is_one_system_call(
    tmp_path: Path, files: list[FileRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges of whole segments are read by a call for each MiB, into their memory, and by none besides."""
    start, size = sum(SIZES[:4]), 12 * SEGMENT_BYTES
    ranges = [RangeRead(name, start, memoryview(bytearray(size)), name) for name in ("one", "two")]
    with CheckpointReader(tmp_path, manifest(*files)) as reader:
        reads = watch_reads(monkeypatch)
        reader.read_ranges(ranges)
    step = 4 * SEGMENT_BYTES
    places = [start + number * step for number in range(3)]
    assert sorted(reads) == [(name, place, step) for name in ("one", "two") for place in places]
    assert all(found.memory == WHOLE[start : start + size] for found in ranges)


def test_a_read_that_stops_early_goes_on(
    tmp_path: Path, files: list[FileRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that the system reads in part, or not at once, are read completely; another error has key and place."""
    turns = itertools.count()
    call = os.preadv

    def stopping(fd: int, buffers: list[memoryview], offset: int) -> int:
        turn = next(turns)
        if turn % 3 == 1:
            raise OSError(errno.EINTR if turn % 2 else errno.EAGAIN, "a signal, or nothing yet")
        return call(fd, [buffers[0][:1000]] if turn % 3 else buffers, offset)

    memory = memoryview(bytearray(len(WHOLE)))
    with CheckpointReader(tmp_path, manifest(*files)) as reader:
        monkeypatch.setattr(os, "preadv", stopping)
        reader.read_ranges([RangeRead("one", 0, memory, "key")])
    assert memory == WHOLE

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with CheckpointReader(tmp_path, manifest(*files)) as reader:
        monkeypatch.setattr(os, "preadv", failing)
        with pytest.raises(StorageError, match=rf"^key: cannot read at offset 100 of {tmp_path}/one: .*\(EIO\)"):
            reader.read_range("one", SIZES[0] + 5, 100, "key")


@pytest.mark.parametrize("place", [50, 3 * SEGMENT_BYTES, len(WHOLE) - 1])
def test_damage_is_named(tmp_path: Path, files: list[FileRecord], place: int) -> None:
    """A changed byte is an error that names the file and the key of the range, in whichever thread it is found."""
    data = bytearray(WHOLE)
    data[place] ^= 1
    (tmp_path / "two").write_bytes(data)
    ranges = [RangeRead(name, 0, memoryview(bytearray(len(WHOLE))), f"key {name}") for name in ("one", "two")]
    with CheckpointReader(tmp_path, manifest(*files)) as reader:
        with pytest.raises(CorruptCheckpointError, match=r"^key two: bytes \d+ to \d+ of .*two are not those"):
            reader.read_ranges(ranges)
        reader.read_ranges(ranges[:1])


@pytest.mark.parametrize("nbytes", [6, SEGMENT_BYTES, 40 * SEGMENT_BYTES])
@pytest.mark.parametrize("offset", [0, 2, 6, 1 << 40])
@pytest.mark.parametrize("is_ours", [True, False])
def test_a_range_outside_of_its_file_is_refused(
    tmp_path: Path, files: list[FileRecord], nbytes: int, offset: int, is_ours: bool
) -> None:
    """A range that a damaged index claims beyond the end is an error that names the key and the file, of any size."""
    ranges = [RangeRead("short", offset, memoryview(bytearray(nbytes)), "key")]
    with (
        CheckpointReader(tmp_path, manifest(*files) if is_ours else FOREIGN) as reader,
        pytest.raises(CorruptCheckpointError, match=r"^key: bytes .* are outside .*short of 5 bytes"),
    ):
        reader.read_ranges(ranges)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_meanwhile(tmp_path: Path, files: list[FileRecord], count: int) -> None:
    """The calling thread does what else there is, once, and its error is raised after all threads have ended."""
    threads: list[int] = []
    ranges = [RangeRead("one", 0, memoryview(bytearray(len(WHOLE))), "key")] * count

    def fail() -> None:
        raise CorruptCheckpointError("meanwhile")

    before = list_threads()
    with CheckpointReader(tmp_path, manifest(*files)) as reader:
        reader.read_ranges(ranges, lambda: threads.append(threading.get_ident()))
        assert threads == [threading.get_ident()]
        with pytest.raises(CorruptCheckpointError, match="meanwhile"):
            reader.read_ranges(ranges, fail)
    assert list_threads() <= before


class _Store:
    """A folder of a store in which reads wait until two are there at once."""

    url = "both://bucket/run"

    def __init__(self, content: dict[str, bytes]) -> None:
        self.content = content
        self.both = threading.Barrier(2)

    def files(self) -> dict[str, int]:
        return {name: len(data) for name, data in self.content.items()}

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        self.both.wait(30)
        return self.content[name][offset : offset + nbytes]


def test_short_ranges_of_a_store_are_requested_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a store every range is a request, which does not wait for the one before."""
    monkeypatch.setenv("SHARDCKPT_REMOTE_THREADS", "2")
    store: Any = _Store({"one": b"first", "two": b"second"})
    ranges = [RangeRead(name, 1, memoryview(bytearray(3)), name) for name in ("one", "two")]
    with CheckpointReader(RemotePath(store), FOREIGN) as reader:
        reader.read_ranges(ranges)
    assert [bytes(found.memory) for found in ranges] == [b"irs", b"eco"]
