from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt.errors import CorruptCheckpointError, StorageError
from shardckpt.local.part_copy import Head, Incoming, Outgoing
from shardckpt.manifest import Record
from tests.remote import jobs
from tests.trees import LoadTree, SaveTree

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """A stored part whose files are in folders."""
    jobs.save(str(tmp_path / "part"), 2.0, sharded_strategy=SaveTree())
    return tmp_path / "part"


def _copy(source: Outgoing, target: Path, head: Head | None = None) -> None:
    copy = Incoming(target, head or source.head, "rank 1")
    try:
        for number in range(len(source.messages)):
            source.read(number)
            copy.buffers.view(number)[:] = source.buffers.view(number)
            copy.write(number)
        copy.complete()
        copy.publish()
    finally:
        copy.close()


def test_files_in_folders_are_copied(tmp_path: Path, part: Path) -> None:
    """A copy of a part has the same files in the same folders, and loads."""
    _copy(Outgoing(part), tmp_path / "copy")
    jobs.check(str(tmp_path / "copy"), 2.0, sharded_strategy=LoadTree())
    files = {path.relative_to(part) for path in part.rglob("*")}
    assert {path.relative_to(tmp_path / "copy") for path in (tmp_path / "copy").rglob("*")} == files


def test_names_of_another_rank_do_not_lead_out(tmp_path: Path, part: Path) -> None:
    """Neither a name that another rank has sent nor a link in the place of a folder leads out of a part."""
    source = Outgoing(part)
    record = Record.parse(source.head.record)
    first = record.files[0].model_copy(update={"name": "arrays/../../x"})
    bad = record.model_copy(update={"files": (first, *record.files[1:])}).dump()
    with pytest.raises(CorruptCheckpointError, match=r"(?s)of rank 1 is damaged.*letters, digits"):
        Incoming(tmp_path / "copy", source.head._replace(record=bad), "rank 1")
    (part / "arrays").rename(tmp_path / "elsewhere")
    (part / "arrays").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="arrays: it is a symbolic link"):
        _copy(source, tmp_path / "copy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "part"]
