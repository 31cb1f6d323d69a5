"""Tables of digests in files of their own: saved, loaded, checked, replaced, removed and refused like those inside."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from shardckpt.engine.pruning import prune_leftovers
from shardckpt.manifest.names import TABLE_SUFFIX
from tests import backends
from tests.engine.table_files import list_tables, read_record, save_value
from tests.remote import jobs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.ranks import RankPool


@backends.both_in_proof
def test_small_saves_have_their_tables_in_the_record(gloo_ranks: RankPool, tmp_path: Path) -> None:
    """Below the limit nothing changes: format 1, tables as text, and no file beside."""
    gloo_ranks.run(2, jobs.save, str(tmp_path / "c"), 1.0)
    assert list_tables(tmp_path / "c") == set()
    assert read_record(tmp_path / "c").format == 1
    assert all(isinstance(file.segments, str) for file in read_record(tmp_path / "c").files)


@backends.both_in_proof
@pytest.mark.parametrize("before", [True, False])
def test_an_overwrite_leaves_no_table_of_the_old_checkpoint(gloo_ranks: RankPool, tmp_path: Path, before: bool) -> None:
    """Tables belong to the checkpoint: they go with it, and other files stay."""
    path = tmp_path / "c"
    first, second = (save_value, jobs.save) if before else (jobs.save, save_value)
    gloo_ranks.run(4, first, str(path), 1.0)
    (path / "notes.digests").write_bytes(b"not the checkpoint's")
    gloo_ranks.run(2, partial(second, overwrite=True), str(path), 2.0)
    gloo_ranks.run(2, jobs.check, str(path), 2.0)
    own = {name for name in read_record(path).list_files() if name.endswith(TABLE_SUFFIX)}
    assert list_tables(path) == own | {"notes.digests"}
    assert bool(own) is not before
    assert prune_leftovers(path) == []
