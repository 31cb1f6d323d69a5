"""``shardckpt.json`` without its model says what the model says, or nothing."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from shardckpt.manifest import FileRecord, Lineage, Marker, Record, parse_plain
from shardckpt.manifest.names import NO_DIGEST
from tests.tables import table

RECORD = Record(
    save_id="ab" * 16,
    backend="npy",
    version=3,
    reader="shardckpt-npy 1",
    writer={"shardckpt": "0.1.0"},
    world_size=2,
    digest_algorithm="crc32",
    files=(
        FileRecord(name="a/b.npy", size=7, rank=1, keys=2, digest="", segments="xyz"),
        FileRecord(name="c.npy", size=9, rank=0, keys=1, digest="", segments=24),
    ),
    parent="cd" * 16,
    step=4,
    content_metadata={"self_digest": "0" * 64},
)
MARKER = Marker(sharded_backend="npy", sharded_backend_version=3)


def test_it_says_what_the_model_says() -> None:
    """Everything that a listing needs is there, of files in folders and with table files, too."""
    found = parse_plain(MARKER.dump(), RECORD.dump())
    assert found is not None
    names = ("save_id", "backend", "version", "reader", "writer", "world_size", "digest_algorithm")
    assert {name: getattr(found, name) for name in names} == {name: getattr(RECORD, name) for name in names}
    assert found.lineage == Lineage(RECORD.parent, RECORD.step)
    assert found.list_files() == RECORD.list_files()
    assert [file._asdict() for file in found.files] == [file.model_dump() for file in RECORD.files]
    assert [file.table_name for file in found.files] == [file.table_name for file in RECORD.files]


@table(
    ("marker", "record"),
    [
        (b"", RECORD.dump()),
        (b"[]", RECORD.dump()),
        (MARKER.dump(), b"{"),
        (MARKER.dump(), b"[" * 100_000),
        (MARKER.dump(), RECORD.dump().replace(b"0.1.0", b"0.1.1")),
        (MARKER.dump(), RECORD.model_copy(update={"version": 4}).dump()),
        (MARKER.dump(), RECORD.model_copy(update={"backend": "ep"}).dump()),
        (MARKER.model_copy(update={"common_backend": "zarr"}).dump(), RECORD.dump()),
        (MARKER.model_copy(update={"shardckpt_generation": f"generation-{'ab' * 16}"}).dump(), RECORD.dump()),
        (
            MARKER.dump(),
            RECORD.model_copy(
                update={"files": (RECORD.files[0].model_copy(update={"name": "../x"}), *RECORD.files[1:])}
            ).dump(),
        ),
        (MARKER.dump(), json.dumps({**json.loads(RECORD.dump()), "self_digest": ""}).encode()),
    ],
)
def test_what_is_not_as_it_was_written_is_left_to_the_model(marker: bytes, record: bytes) -> None:
    """A changed byte, another save's marker, an unusual marker or a bad name of a file: it says nothing."""
    assert parse_plain(marker, record) is None


@table(
    "change",
    [
        {"reader": None},
        {"world_size": 0},
        {"files": {}},
        {"files": [{**RECORD.files[1].model_dump(), "segments": 0}]},
        {"files": [{**RECORD.files[1].model_dump(), "name": name} for name in ("a.bin", "a.bin/b.bin")]},
        {"timings": []},
    ],
)
def test_what_the_model_refuses_under_a_right_digest_is_left_to_it(change: dict[str, Any]) -> None:
    """Another writer's record, which no load accepts, is no whole checkpoint in a listing."""
    text = json.dumps({**json.loads(RECORD.dump()), **change, "self_digest": NO_DIGEST})
    head, _, tail = text.rpartition(NO_DIGEST)
    record = (head + hashlib.sha256(text.encode()).hexdigest() + tail).encode()
    with pytest.raises(ValueError, match=f"(?s)Record.*{next(iter(change))}"):
        Record.parse(record)
    assert parse_plain(MARKER.dump(), record) is None
