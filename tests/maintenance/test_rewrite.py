from __future__ import annotations

import hashlib
import random
from functools import cache
from typing import TYPE_CHECKING

import pytest

from shardckpt.errors import CorruptCheckpointError
from shardckpt.maintenance.rewrite import rewrite_file
from shardckpt.storage.digest import SMALL_RECORD, Segments
from shardckpt.storage.reader import CheckpointReader
from shardckpt.storage.writer import CheckpointWriter
from shardckpt.strategy import KeptItem
from tests.storage.files import manifest, write

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from shardckpt.manifest import FileRecord

#: Bytes of items: small ones, some that are joined, one on the limit, one above, and one of several pieces.
SIZES = (1, 100, 4096, SMALL_RECORD, SMALL_RECORD + 1, 3, 17, 5, 2_000_000, 5_000_003, 64, 0, 9)
NAME = "__0_0.distcp"


@cache
def contents() -> list[bytes]:
    """The items."""
    drawn = random.Random(3)
    return [drawn.randbytes(size) for size in SIZES]


def packed(items: Sequence[bytes], kept: Sequence[int]) -> list[KeptItem]:
    """Some of the items, which lie behind one another on multiples of 64, packed in the same way."""
    starts, place, found, to = [], 0, [], 0
    for item in items:
        starts.append(place)
        place += len(item) + -len(item) % 64
    for number in kept:
        size = len(items[number])
        found.append(KeptItem(f"key{number}", starts[number], size, to, (700, size - 900) if size > 1 << 20 else ()))
        to += size + -size % 64
    return found


@pytest.fixture
def old(tmp_path: Path) -> FileRecord:
    """A file of all items, each a record with the zeros that align the next."""
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    return write(tmp_path / "old", NAME, [(item, bytes(-len(item) % 64)) for item in contents()])


@pytest.mark.parametrize("kept", [range(len(SIZES)), (0, 2, 3, 5, 6, 7, 9, 12), (1, 11), (8,), (9, 10)])
@pytest.mark.parametrize("hashed", [False, True])
def test_what_stays_is_copied(tmp_path: Path, old: FileRecord, kept: Sequence[int], hashed: bool) -> None:
    """The new file has the kept items where they are announced, zeros between, and digests and counts of its own."""
    items = contents()
    with (
        CheckpointReader(tmp_path / "old", manifest(old), verify=True) as reader,
        CheckpointWriter(tmp_path / "new", 0, sha256=hashed) as writer,
    ):
        plan = packed(items, kept)
        rewrite_file(NAME, plan, reader, writer)
        (new,) = writer.files
        sha256 = dict(writer.sha256)
    data = (tmp_path / "new" / NAME).read_bytes()
    expected = bytearray(plan[-1].to + plan[-1].nbytes)
    for item, number in zip(plan, kept, strict=True):
        expected[item.to : item.to + item.nbytes] = items[number]
    assert data == bytes(expected)
    assert (new.size, new.keys) == (len(data), len(kept))
    assert sha256 == ({NAME: hashlib.sha256(data).hexdigest()} if hashed else {})
    with CheckpointReader(tmp_path / "new", manifest(new), verify=True) as reader:
        assert reader.read(NAME) == data
    bounds = {start for start, _, _ in _segments(new)}
    assert {item.to + cut for item in plan for cut in item.cuts} <= bounds


def _segments(record: FileRecord) -> list[tuple[int, int, int]]:
    algorithm = manifest(record).record
    assert algorithm is not None
    table = Segments.unpack(record.segments, record.digest, record.size, algorithm.digest_algorithm)
    return list(table.touching(0, record.size))


@pytest.mark.parametrize("damaged", [5, 6, 9])
@pytest.mark.parametrize("hashed", [False, True])
def test_a_damaged_item_is_named(tmp_path: Path, old: FileRecord, damaged: int, hashed: bool) -> None:
    """An item that is not what was written is an error with its key; if it is left out, nobody minds."""
    items = contents()
    plan = packed(items, range(len(items)))
    path = tmp_path / "old" / NAME
    data = bytearray(path.read_bytes())
    data[plan[damaged].start + plan[damaged].nbytes // 2] ^= 1
    path.write_bytes(data)
    with CheckpointReader(tmp_path / "old", manifest(old), verify=True) as reader:
        with (
            CheckpointWriter(tmp_path / "new", 0, sha256=hashed) as writer,
            pytest.raises(CorruptCheckpointError, match=rf"^key{damaged}: .*digest differs"),
        ):
            rewrite_file(NAME, plan, reader, writer)
        (tmp_path / "new" / NAME).unlink()
        with CheckpointWriter(tmp_path / "new", 0, sha256=hashed) as writer:
            rewrite_file(NAME, packed(items, [n for n in range(len(items)) if n != damaged]), reader, writer)
