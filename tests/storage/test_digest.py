"""Digests: a table of segments that survives the way through text, and finds the segments of any range."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from array import array
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardckpt import dist_checkpointing
from shardckpt.cli import main
from shardckpt.errors import CheckpointingException, CorruptCheckpointError, StorageError
from shardckpt.mapping import ShardedTensor
from shardckpt.storage import digest
from shardckpt.storage.digest import (
    ALGORITHMS,
    CRC32,
    MAX_SEGMENT,
    XXH3,
    Algorithm,
    Segments,
    digest_function,
    digest_functions,
    digest_vote,
    negotiate_digest,
    preferred,
)
from shardckpt.testing import RankThreads
from tests.damage import flip
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

WIDTHS = {name: array(algorithm.typecode).itemsize for name, algorithm in ALGORITHMS.items()}
LENGTHS = st.lists(st.integers(1, MAX_SEGMENT), max_size=30)


def digests(count: int, algorithm: str) -> st.SearchStrategy[list[int]]:
    """As many digests as there are segments."""
    return st.lists(st.integers(0, 256 ** WIDTHS[algorithm] - 1), min_size=count, max_size=count)


TABLES = st.tuples(LENGTHS, st.sampled_from(sorted(WIDTHS))).flatmap(
    lambda drawn: st.tuples(st.just(drawn[0]), digests(len(drawn[0]), drawn[1]), st.just(drawn[1]))
)
Table = tuple[list[int], list[int], str]


@given(TABLES)
def test_round_trip(table: Table) -> None:
    """A table is the same after pack and unpack, and its root is the SHA-256 of both columns, little-endian."""
    segments = Segments(*table)
    found = Segments.unpack(segments.pack(), segments.root(), segments.size, table[2])
    assert (list(found.lengths), list(found.digests)) == table[:2]
    assert len(found) == len(table[0])
    columns = b"".join(value.to_bytes(4, "little") for value in table[0])
    columns += b"".join(value.to_bytes(WIDTHS[table[2]], "little") for value in table[1])
    assert segments.root() == hashlib.sha256(columns).hexdigest()


@given(TABLES, st.data())
def test_segments_of_a_range(table: Table, data: st.DataObject) -> None:
    """A range gets exactly the segments that hold any byte of it, in order, with their bounds and digests."""
    segments = Segments(*table)
    start = data.draw(st.integers(0, segments.size))
    stop = data.draw(st.integers(start, segments.size))
    ends = list(accumulate(table[0]))
    expected = [
        (end - length, end, digest)
        for end, length, digest in zip(ends, *table[:2], strict=True)
        if start < stop and end - length < stop and start < end
    ]
    assert [found for found in segments.touching(start, stop) if start < stop] == expected


@given(TABLES, st.integers(0), st.integers(0, 7))
def test_every_flipped_bit_of_the_text_is_noticed(table: Table, place: int, bit: int) -> None:
    """A damaged table is refused, or is still the same table."""
    segments = Segments(*table)
    text = bytearray(segments.pack().encode())
    text[place % len(text)] ^= 1 << bit
    try:
        found = Segments.unpack(text.decode("latin-1"), segments.root(), segments.size, table[2])
    except CorruptCheckpointError:
        return
    assert (list(found.lengths), list(found.digests)) == table[:2]


def packed(raw: bytes) -> tuple[str, str]:
    """Any bytes as the text of a table, and their root."""
    return base64.b64encode(zlib.compress(raw)).decode(), hashlib.sha256(raw).hexdigest()


@table(
    ("raw", "size"),
    [
        (b"\1\0\0\0" * 2, 2),  # one segment of 1 byte for a file of 2
        (b"\1\0\0\0" * 3, 1),  # columns of unequal length
        (b"\1\0\0", 1),  # not whole numbers
        (bytes(12) + (9).to_bytes(4, "little") + bytes(16), 9),  # segments without bytes
        (bytes(800_000_000 // 100), 10),  # a bomb: more segments than the file has bytes
        ((MAX_SEGMENT + 1).to_bytes(4, "little") * 2, MAX_SEGMENT + 1),  # a segment that is too long to check
    ],
)
def test_tables_for_another_file(raw: bytes, size: int) -> None:
    """A table that has its root and does not fit the file is refused, before more memory is taken than it needs."""
    with pytest.raises(CorruptCheckpointError, match="the table of digests is"):
        Segments.unpack(*packed(raw), size, CRC32)


def test_no_text() -> None:
    """What is neither base64 nor deflated is refused."""
    for text in ("§", "AAAA", "", "e\ud800"):
        with pytest.raises(CorruptCheckpointError, match="the table of digests is damaged"):
            Segments.unpack(text, "00", 10, CRC32)


@given(LENGTHS)
def test_tables_of_older_checkpoints(lengths: list[int]) -> None:
    """A table whose CRCs are deflated with the lengths, as they once were, is read."""
    crcs = [zlib.crc32(bytes([n])) for n in range(len(lengths))]
    raw = b"".join(value.to_bytes(4, "little") for value in [*lengths, *crcs])
    found = Segments.unpack(*packed(raw), sum(lengths), CRC32)
    assert (list(found.lengths), list(found.digests)) == (lengths, crcs)


def test_digests_of_another_width() -> None:
    """A table read as one of another algorithm is refused: its columns do not tile the file."""
    table = Segments([5, 6, 7, 8], [1, 2, 3, 4], CRC32)
    with pytest.raises(CorruptCheckpointError, match="the table of digests is"):
        Segments.unpack(table.pack(), table.root(), table.size, XXH3)


def test_known_values() -> None:
    """Digests are CRC-32 and XXH3-64 as everyone computes them, of bytes and of views."""
    assert digest_function(CRC32)(b"123456789") == 0xCBF43926
    xxhash = pytest.importorskip("xxhash")
    assert preferred() == XXH3
    assert digest_function(XXH3)(b"") == 0x2D06800538D394C2
    data = array("f", range(1000))
    assert digest_function(XXH3)(memoryview(data)) == xxhash.xxh3_64(data.tobytes()).intdigest()


@table("name", [*ALGORITHMS])
def test_pieces_have_the_digest_of_their_bytes(name: str) -> None:
    """A digest of several pieces of memory is that of the bytes, whether an algorithm takes pieces or one memory."""
    digest_one, digest_joined = digest_functions(name)
    content = bytes(range(256)) * 9
    for cuts in ([0], [0, 0], [1000], [1, 7, 7, 2000]):
        ends = [0, *cuts, len(content)]
        pieces = [memoryview(content)[low:high] for low, high in pairwise(ends)]
        assert digest_joined(pieces) == digest_one(content)


def test_stored_names_and_widths() -> None:
    """What released checkpoints name is read for ever: CRC-32 in 4 bytes, XXH3-64 in 8."""
    assert {"crc32": 4, "xxh3_64": 8}.items() <= WIDTHS.items()
    assert {CRC32, XXH3} <= WIDTHS.keys()


def test_an_algorithm_is_one_entry_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one entry before the others, saves use a new algorithm, and loads and verify find damage by it."""
    blake2b = Algorithm("Q", lambda: lambda data: int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"))
    monkeypatch.setattr(digest, "ALGORITHMS", {"blake2b_64": blake2b, **ALGORITHMS})
    path = tmp_path / "checkpoint"
    state = {"weight": ShardedTensor.from_rank_offsets("weight", torch.arange(100.0))}
    dist_checkpointing.save(state, path)
    assert json.loads((path / "shardckpt.json").read_text())["digest_algorithm"] == "blake2b_64"
    assert dist_checkpointing.load(state, path)["weight"][99] == 99
    assert main(["verify", str(path)]) == 0

    (file,) = path.glob("*.distcp")
    flip(file, torch.arange(90.0, 100.0).numpy().tobytes())
    with pytest.raises(CorruptCheckpointError, match=file.name):
        dist_checkpointing.load(state, path)
    assert main(["verify", str(path)]) == 1
    monkeypatch.undo()
    with pytest.raises(CorruptCheckpointError, match="digests are 'blake2b_64', this release knows"):
        dist_checkpointing.load(state, path)
    assert "intact: every byte" in capsys.readouterr().out


def test_without_xxhash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where xxhash cannot be imported CRC-32 is preferred, and XXH3 is an error that says what to install."""
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert preferred() == CRC32
    assert negotiate_digest(digest_vote()) == CRC32
    with pytest.raises(CheckpointingException, match=r"pip install 'shardckpt\[xxhash\]'.* SHARDCKPT_VERIFY_READS=0"):
        digest_function(XXH3)
    table = Segments([3], [1 << 63], XXH3)
    assert list(Segments.unpack(table.pack(), table.root(), 3, XXH3).digests) == [1 << 63]


def test_ranks_choose_what_all_can_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save has the best algorithm that every rank has: one rank without xxhash makes it CRC-32."""
    pytest.importorskip("xxhash")
    with_xxhash = digest_vote()
    monkeypatch.setitem(sys.modules, "xxhash", None)
    without = digest_vote()
    assert negotiate_digest(with_xxhash, with_xxhash) == XXH3
    assert negotiate_digest(with_xxhash, without) == negotiate_digest(max(with_xxhash, without)) == CRC32


def test_unknown_algorithms() -> None:
    """An algorithm of a newer release is refused with the way out."""
    for call in (digest_function, lambda name: Segments([], [], name), lambda name: Segments.unpack("", "", 0, name)):
        with pytest.raises(CorruptCheckpointError, match=r"digests are 'blake9'.*SHARDCKPT_VERIFY_READS=0"):
            call("blake9")


def test_tables_that_nobody_could_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that would be refused when it is read is refused when it is written."""
    monkeypatch.setattr(digest, "_MAX_TABLE", 24)
    table = Segments([5, 6], [1, 2], XXH3)
    assert list(Segments.unpack(table.pack(), table.root(), 11, XXH3).lengths) == [5, 6]
    with pytest.raises(StorageError, match="a file of 3 records and pieces is more than is read"):
        Segments([5, 6, 7], [1, 2, 3], XXH3).pack()


def _save(path: str) -> None:
    shard = ShardedTensor.from_rank_offsets("w", torch.ones(1), (0, dist.get_rank(), dist.get_world_size()))
    dist_checkpointing.save({"w": shard}, path)


def test_the_votes_of_all_ranks_fit_into_a_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have the last of five algorithms alone agree on it: votes are added up in int64."""
    lacking = ALGORITHMS[CRC32]._replace(load=_raise_import_error)
    monkeypatch.setattr(digest, "ALGORITHMS", {**dict.fromkeys("abcd", lacking), CRC32: ALGORITHMS[CRC32]})
    RankThreads().run(2, _save, str(tmp_path / "c"))
    assert json.loads((tmp_path / "c" / "shardckpt.json").read_text())["digest_algorithm"] == CRC32
    assert (1 << 20).bit_length() * len(ALGORITHMS) < 63


def _raise_import_error() -> Any:
    raise ImportError
