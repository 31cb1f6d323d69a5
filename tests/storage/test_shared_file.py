from __future__ import annotations

import hashlib
import os
import random
import zlib
from typing import TYPE_CHECKING

import pytest

from shardckpt.errors import StorageError
from shardckpt.storage import CheckpointWriter, cut_segments
from shardckpt.storage.digest import Segments
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

DATA = random.Random(0).randbytes((3 << 20) + 4096 + 17)
CUTS = (0, 4096, (2 << 20) + 4096, (2 << 20) + 8192, len(DATA))


def _write(writer: CheckpointWriter, numbers: list[int], size: int = len(DATA)) -> None:
    """Write some of the ranges between the cuts."""
    file = writer.share("w.bin", size)
    for number in numbers:
        piece = memoryview(bytearray(DATA[CUTS[number] : CUTS[number + 1]]))
        file.write(CUTS[number], lambda piece=piece: piece, cut_segments(piece.nbytes), 1, "w")  # type: ignore[misc]
    writer.finish_part(file)


def test_two_writers_make_one_file(tmp_path: Path) -> None:
    """Ranges of two writers, in any order, become a file with one record, whose digests are those of its bytes."""
    with (
        CheckpointWriter(tmp_path, 0, algorithm="crc32", sha256=True) as one,
        CheckpointWriter(tmp_path, 1, algorithm="crc32") as other,
    ):
        _write(other, [3, 1])
        _write(one, [2, 0])
        assert not one.recorded_files()
        (record,) = one.complete_parts([*one.parts, *other.parts])
        one.hash_files([record.name])
    assert (tmp_path / "w.bin").read_bytes() == DATA
    assert (record.name, record.size, record.rank, record.keys) == ("w.bin", len(DATA), 0, 4)
    assert isinstance(record.segments, str)
    table = Segments.unpack(record.segments, record.digest, record.size, "crc32")
    assert all(digest == zlib.crc32(DATA[a:b]) for a, b, digest in table.touching(0, len(DATA)))
    assert one.sha256 == {"w.bin": hashlib.sha256(DATA).hexdigest()}


def test_a_writer_with_all_ranges_has_a_file(tmp_path: Path) -> None:
    """Then it is recorded as any other, and needs no other rank."""
    with CheckpointWriter(tmp_path, 0) as writer:
        _write(writer, [0, 1, 2, 3])
        assert [(file.name, file.size) for file in writer.recorded_files()] == [("w.bin", len(DATA))]
        assert not writer.parts


@table("numbers", [[0, 1, 3], [0, 1, 2], [0, 1, 2, 3, 2]], ids=["hole", "end", "overlap"])
def test_parts_that_do_not_fill_the_file(tmp_path: Path, numbers: list[int]) -> None:
    """A hole, a missing end and an overlap fail, with the file and the place."""
    with CheckpointWriter(tmp_path, 0) as writer, CheckpointWriter(tmp_path, 1) as other:
        _write(writer, numbers[:2])
        _write(other, numbers[2:])
        with pytest.raises(StorageError, match=r"w\.bin: the ranks have written .* hole or an overlap at byte"):
            writer.complete_parts([*writer.parts, *other.parts])


def test_a_part_of_another_length_than_planned(tmp_path: Path) -> None:
    """Fails the file, with what it is of."""
    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.share("w.bin", 100)
        with pytest.raises(StorageError, match="'w' has 3 bytes, and 100 were planned"):
            file.write(0, lambda: memoryview(b"abc"), [100], what="'w'")


def test_a_full_disk_is_the_file_s_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of a thread is raised when the file is finished, and names the file and what was written."""
    with CheckpointWriter(tmp_path, 0) as writer:
        file = writer.share("w.bin", len(DATA))

        def fail(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwritev", fail)
        file.write(0, lambda: memoryview(bytearray(DATA)), cut_segments(len(DATA)), what="'key'")
        with pytest.raises(StorageError, match=r"cannot write 'key' at offset .*w\.bin: No space left"):
            writer.finish_part(file)
