"""Tables of digests in files of their own: saved, loaded, checked, replaced, removed and refused like those inside."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.commit.removal import delete_checkpoint
from shardckpt.engine.integrity import save_integrity_manifest, verify_integrity_manifest
from shardckpt.engine.transaction import check_records
from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.maintenance.verify import DAMAGED, INTACT, get_exit_code, verify_checkpoint
from shardckpt.manifest import RECORD_NAME, FileRecord, Record
from shardckpt.manifest.names import TABLE_SUFFIX
from shardckpt.mapping import ShardedTensor
from shardckpt.plugins import get_plugin_manager
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from shardckpt.storage.digest import Segments
from tests import backends
from tests.damage import flip
from tests.engine.table_files import list_tables, moved, read_record, save_value
from tests.remote import jobs
from tests.remote.store import Store
from tests.states import rank_and_size
from tests.tables import in_proof, table
from tests.trees import SaveTree

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.ranks import Ranks


@pytest.fixture
def saved(ranks: Ranks, tmp_path: Path) -> Path:
    """A checkpoint of two ranks with table files."""
    ranks.run(2, save_value, str(tmp_path / "c"))
    return tmp_path / "c"


@backends.both_in_proof
@pytest.mark.parametrize("world", [2, *in_proof(4)])
def test_a_save_with_table_files_is_loaded_by_any_number_of_ranks(ranks: Ranks, tmp_path: Path, world: int) -> None:
    """Every file has its table beside it, the record only says how long it is, and 1, 2 and 4 ranks read the values."""
    path = tmp_path / "c"
    ranks.run(world, save_value, str(path))
    record = read_record(path)
    assert json.loads((path / RECORD_NAME).read_bytes())["format"] == 3
    assert all(isinstance(file.segments, int) for file in record.files)
    assert len({file.rank for file in record.files}) == world
    assert {name: (path / name).stat().st_size for name in record.list_files()} == record.list_files()
    assert {file.name for file in path.iterdir()} == {*record.list_files(), "metadata.json", RECORD_NAME}
    for readers in (1, 2, 4):
        ranks.run(readers, jobs.check, str(path), 1.0)
    assert get_exit_code(verify_checkpoint(path)) == INTACT


@backends.both_in_proof
@pytest.mark.parametrize("how", ["", "thread", pytest.param("process", marks=pytest.mark.ci)])
def test_tables_go_to_a_store_with_their_files(ranks: Ranks, tmp_path: Path, how: str) -> None:
    """A save to a URL uploads the tables, in the foreground and behind the training; a load reads them from there."""
    store = Store(tmp_path / "store")
    url = f"local://{store.objects}" if how == "process" else store.url
    ranks.run(2, save_value, url, 1.0, how)
    assert list_tables(store.objects) >= {_table(0), _table(1)}
    ranks.run(2, jobs.check, url, 1.0)


@backends.both_in_proof
def test_one_process_keeps_its_tables(tmp_path: Path) -> None:
    """With one rank no tables come together, and local checkpoints, which send theirs, have them in the record."""
    save_value(str(tmp_path / "c"))
    assert list_tables(tmp_path / "c") == set()


def _other_table(path: Path) -> None:
    """The table of another file."""
    one, other = (path / _table(rank) for rank in (0, 1))
    one.write_bytes(other.read_bytes())


def _table(rank: int = 0) -> str:
    return backends.data_file(rank) + TABLE_SUFFIX


_DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": lambda path: flip(path / _table()),
    "missing": lambda path: (path / _table()).unlink(),
    "cut": lambda path: os.truncate(path / _table(), 12),
    "empty": lambda path: os.truncate(path / _table(), 0),
    "huge": lambda path: os.truncate(path / _table(), 1 << 40),
    "another's": _other_table,
    "a link": lambda path: ((path / _table()).unlink(), (path / _table()).symlink_to("/dev/zero")),
    "a folder": lambda path: ((path / _table()).unlink(), (path / _table()).mkdir()),
}


@backends.both_in_proof
@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_table_fails_a_load_and_is_found(ranks: Ranks, saved: Path, damage: str) -> None:
    """A table that is not as written is the same error on all ranks, and verify names the table and the file."""
    _DAMAGES[damage](saved)
    verdicts = ranks.run(2, jobs.error_of, jobs.check, str(saved), 1.0)
    assert verdicts[0] == verdicts[1]
    kind, text = verdicts[0]
    assert kind in ("CorruptCheckpointError", "StorageError")
    assert backends.data_file(0) in text
    results = verify_checkpoint(saved)
    assert {result.name for result in results if result.fault} == {backends.data_file(0), _table()}
    assert get_exit_code(results) == DAMAGED


@backends.both_in_proof
def test_damaged_data_has_one_verdict_in_both_forms(ranks: Ranks, tmp_path: Path) -> None:
    """The same damage to the same bytes is the same error, wherever the table is, and verify finds the one file."""
    verdicts = []
    for name, save in (("inside", jobs.save), ("beside", save_value)):
        ranks.run(2, save, str(tmp_path / name), 1.0)
        flip(tmp_path / name / backends.data_file(1))
        kind, text = ranks.run(2, jobs.error_of, jobs.check, str(tmp_path / name), 1.0)[0]
        faults = [result.name for result in verify_checkpoint(tmp_path / name) if result.fault]
        verdicts.append((kind, text.replace(f"/{name}/", "/"), faults))
    assert verdicts[0] == verdicts[1]
    assert verdicts[0][0] == "CorruptCheckpointError"
    assert verdicts[0][2] == [backends.data_file(1)]


@backends.both_in_proof
def test_a_load_without_checks_needs_no_table(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARDCKPT_VERIFY_READS=0 reads what is there, as it does with tables inside."""
    for name in list_tables(saved):
        (saved / name).unlink()
    monkeypatch.setenv("SHARDCKPT_VERIFY_READS", "0")
    jobs.check(str(saved), 1.0)


def _with_files(path: Path, *files: FileRecord) -> None:
    (path / RECORD_NAME).write_bytes(read_record(path).model_copy(update={"files": files}).dump())


@backends.both_in_proof
def test_hostile_sizes_are_refused_before_memory_is_taken(saved: Path) -> None:
    """A table that is longer than any of its file can be is refused, though the record and the disk agree on it."""
    files = read_record(saved).files
    _with_files(saved, *(file.model_copy(update={"segments": 1 << 40}) for file in files))
    for name in list_tables(saved):
        os.truncate(saved / name, 1 << 40)
    with pytest.raises(CorruptCheckpointError, match="it has 1099511627776 bytes"):
        jobs.check(str(saved), 1.0)


@table(
    ("change", "text"),
    [
        ({"name": "a" + TABLE_SUFFIX}, "is the name of a table of digests, and of another file"),
        ({"name": f"a{TABLE_SUFFIX}/b"}, "is the name of a table of digests, and of another file or a folder"),
        ({"name": "x" * 250, "segments": 16}, "a file of a checkpoint has a name"),
        ({"name": "b", "segments": 0}, "greater than 0"),
        ({"name": "b", "segments": -1}, "greater than 0"),
        ({"name": "b", "segments": 1.5}, "valid string"),
        ({"name": "b", "segments": True}, "valid"),
    ],
)
def test_hostile_records_are_refused(change: dict[str, Any], text: str) -> None:
    """A table file has a name that no other file has, and bytes."""
    first = {"name": "a", "size": 1, "rank": 0, "keys": 1, "digest": "0" * 64, "segments": 16}
    fields = {"save_id": "ab" * 16, "backend": "", "version": 1, "reader": "", "writer": {}, "world_size": 1}
    record = {**fields, "format": 3, "digest_algorithm": "crc32", "files": [first, {**first, "segments": "", **change}]}
    with pytest.raises(ValueError, match=text):
        Record.parse(json.dumps(record).encode())


def test_a_table_with_segments_of_no_bytes_is_refused() -> None:
    """Raw tables are checked like packed ones: digest, length, and segments that tile the file."""
    table = Segments([4, 4], [1, 2])
    assert list(Segments.from_bytes(table.to_bytes(), table.root(), 8, "crc32").lengths) == [4, 4]
    for wrong in (Segments([4, 4, 0], [1, 2, 3]), Segments([8 << 20], [1]), Segments([4], [1])):
        with pytest.raises(CorruptCheckpointError, match="not cut as it should be"):
            Segments.from_bytes(wrong.to_bytes(), wrong.root(), 8, "crc32")
    for cut in (table.to_bytes()[:-1], table.to_bytes() + b"\0" * 8):
        with pytest.raises(CorruptCheckpointError, match="does not have the digest"):
            Segments.from_bytes(cut, table.root(), 8, "crc32")


def test_two_files_with_one_name_are_refused() -> None:
    """A strategy's file may not have the name of a table of another rank's file."""
    one = FileRecord(name="a", size=1, rank=0, keys=1, digest="0" * 64, segments=16)
    other = FileRecord(name=f"a{TABLE_SUFFIX}", size=1, rank=1, keys=1, digest="0" * 64, segments="x")
    with pytest.raises(StorageError, match=r"recorded twice: 'a\.digests' by rank 0, 'a\.digests' by rank 1"):
        check_records([one, other])


@backends.both_in_proof
def test_integrity_json_has_the_tables(ranks: Ranks, tmp_path: Path) -> None:
    """It lists the table files, written with the save or after it, and a damaged one is found by it."""
    ranks.run(2, partial(save_value, verify_integrity=True), str(tmp_path / "with"))
    ranks.run(2, save_value, str(tmp_path / "after"))
    save_integrity_manifest(tmp_path / "after")
    for name in ("with", "after"):
        path = tmp_path / name
        listed = json.loads((path / "integrity.json").read_bytes())["files"]
        assert list_tables(path) <= set(listed)
        assert all(listed[file.table_name] == file.digest for file in read_record(path).files)
        verify_integrity_manifest(path)
        flip(path / _table())
        with pytest.raises(CorruptCheckpointError, match=f"{_table()}: the SHA-256 of"):
            verify_integrity_manifest(path)


def _save_two(path: str, **options: Any) -> None:
    rank, world = rank_and_size()
    rows = [torch.full((64, 64), float(number)) for number in range(2)]
    state = {f"w{n}": ShardedTensor.from_rank_offsets(f"w{n}", rows[n], (0, rank, world)) for n in range(2)}
    with moved():
        dc.save(state, path, **options)


@backends.both_in_proof
@pytest.mark.parametrize("sha256", [False, True])
def test_removing_keys_rewrites_tables(ranks: Ranks, tmp_path: Path, sha256: bool) -> None:
    """Rewritten files have new tables beside them, the old ones are gone, and what is left is as it was."""
    path = tmp_path / "c"
    ranks.run(2, partial(_save_two, verify_integrity=sha256), str(path))
    before = read_record(path).list_files()
    with moved():
        dc.remove_sharded_tensors(str(path), "w0")
    record = read_record(path)
    assert record.format == 3
    assert {file.name for file in path.iterdir()} - {"metadata.json", RECORD_NAME, "integrity.json"} == set(
        record.list_files()
    )
    assert record.list_files()[backends.data_file(0)] < before[backends.data_file(0)]
    assert get_exit_code(verify_checkpoint(path)) == INTACT
    loaded = dc.load({"w1": ShardedTensor.from_rank_offsets("w1", torch.zeros(128, 64))}, path)
    assert bool((loaded["w1"] == 1).all())


def test_a_checkpoint_is_removed_from_a_store_with_its_tables(ranks: Ranks, tmp_path: Path) -> None:
    """Tables in folders go with the checkpoint, although other objects there stay."""
    store = Store(tmp_path / "store")
    ranks.run(2, partial(save_value, sharded_strategy=SaveTree()), store.url)
    tables = list_tables(store.objects)
    (store.objects / "arrays" / "notes.digests").touch()
    delete_checkpoint(RemotePath(open_folder(store.url, get_plugin_manager())))
    assert len(tables) > 3
    assert list_tables(store.objects) == {"arrays/notes.digests"}
