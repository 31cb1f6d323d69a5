from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.maintenance.verify import verify_checkpoint
from tests import backends, programs
from tests.names import MARKERS
from tests.remote import jobs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.backends import Backend
    from tests.ranks import Ranks
    from tests.remote.store import Store

PERSISTENT = pytest.mark.parametrize(
    "persistent", [False, pytest.param(True, marks=pytest.mark.ci)], ids=["thread", "process"]
)


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


@backends.both_in_proof
@pytest.mark.ci
def test_a_process_without_the_protocol_is_an_error(ranks: Ranks, store: Store) -> None:
    """A worker process that has no plugin for the URL says so on all ranks, and nothing is left."""
    errors = ranks.run(2, jobs.error_of, jobs.save_in_background, store.url, 1.0, True)
    assert len(set(errors)) == 1
    assert "no installed plugin serves faulty://" in errors[0][1]
    assert not store.names()


@backends.both_in_proof
@PERSISTENT
@pytest.mark.proof
def test_a_save_in_flight_at_the_end_of_one_process_is_finished(tmp_path: Path, persistent: bool) -> None:
    """A program that ends right after scheduling leaves a whole checkpoint at the URL, event loops and all."""
    script = tmp_path / "train.py"
    program = f"""
        import sys
        sys.path.insert(0, {str(programs.ROOT)!r})
        from shardckpt import dist_checkpointing as dc
        from shardckpt.async_save import AsyncCallsQueue
        from tests.remote import jobs

        queue = AsyncCallsQueue(persistent={persistent})
        queue.schedule_async_request(dc.save(jobs.state(3.0), sys.argv[1], async_sharded_save=True))
    """
    script.write_text(textwrap.dedent(program))
    url = f"{'local' if persistent else 'looped'}://{tmp_path}/c"
    done = programs.run("", url, file=str(script), warnings_are_errors=True)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    jobs.check(url, 3.0)
