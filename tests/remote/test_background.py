from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance.verify import verify_checkpoint
from tests import backends
from tests.names import MARKERS
from tests.remote import jobs
from tests.remote.background import PERSISTENT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends import Backend
    from tests.ranks import Ranks
    from tests.remote.store import Store


@backends.both_in_proof
@PERSISTENT
@pytest.mark.parametrize("world_size", [pytest.param(0, marks=pytest.mark.ci), 2])
def test_a_background_save_uploads_behind_the_training(
    ranks: Ranks, tmp_path: Path, world_size: int, persistent: bool
) -> None:
    """A thread, or a process that opens the URL itself, uploads; the checkpoint is whole when it is finalized."""
    url = f"local://{tmp_path}/c"
    if world_size:
        ranks.run(world_size, jobs.save_in_background, url, 3.0, persistent)
        ranks.run(3, jobs.check, url, 3.0)
    else:
        jobs.save_in_background(url, 3.0, persistent)
    jobs.check(url, 3.0)
    assert not [result for result in verify_checkpoint(url) if result.fault or result.foreign]


@backends.both_in_proof
def test_data_is_uploaded_before_the_training_is_asked_to_finalize(store: Store, backend: Backend) -> None:
    """The background part uploads the data files and the index; metadata.json follows when it is finalized."""
    request = dc.save(jobs.state(1.0), store.url, async_sharded_save=True)
    assert request is not None
    request.async_fn(*request.staged().async_fn_args)  # type: ignore[misc]
    names = [upload.name for upload in store.requests("put")]
    assert set(names[1:]) == {*backend.shared - MARKERS, backend.data_file(0)}
    request.failed_fn(RuntimeError("given up"))  # type: ignore[misc]
    assert not store.names()


@backends.both_in_proof
def test_an_upload_that_fails_in_the_background_is_everyones_error(ranks: Ranks, store: Store) -> None:
    """An upload that fails for good names rank, object and URL on all ranks; nothing is left at the URL."""
    store.fails("put", 2)
    errors = ranks.run(2, jobs.error_of, jobs.save_in_background, store.url, 1.0, False)
    assert len(set(errors)) == 1
    assert errors[0][0] == "StorageError"
    assert any(f"cannot upload {store.url}/{backends.data_file(rank)}" in errors[0][1] for rank in range(2))
    assert "rank " in errors[0][1]
    store.works()
    assert not store.names()
    ranks.run(2, jobs.save_in_background, store.url, 2.0, False)
    jobs.check(store.url, 2.0)
