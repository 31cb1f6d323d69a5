from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt import settings
from shardckpt.commit.removal import delete_checkpoint
from shardckpt.commit.upload import Upload
from shardckpt.engine.locations import open_folder
from shardckpt.errors import IncompleteCheckpointError, NotACheckpointError, StorageError
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest import FileRecord
from shardckpt.plugins.manager import get_plugin_manager
from shardckpt.storage import RemotePath
from tests import backends
from tests.remote import jobs
from tests.remote.faults import count_uploads
from tests.trees import LoadTree, SaveTree

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.ranks import Ranks
    from tests.remote.store import Store


@backends.both_in_proof
@pytest.mark.parametrize("how", ["before", "after"])
def test_a_save_whose_kth_upload_fails_is_absent(ranks: Ranks, store: Store, how: str) -> None:
    """Whichever upload fails for good, all ranks say which rank and object, and no object of the save remains."""
    for number in range(1, count_uploads() + 1):
        store.fails("put", number, how=how)
        errors = ranks.run(2, jobs.error_of, jobs.save, store.url, 1.0)
        uploads = store.requests("put")
        failed = {request.name for request in uploads[number - 1 :]}
        store.works()
        assert len(set(errors)) == 1
        kind, message = errors[0]
        assert kind == "StorageError"
        assert any(f"cannot upload {store.url}/{name} in 2 attempts: ConnectionError: " in message for name in failed)
        assert "rank " in message
        assert not store.names(), number
        with pytest.raises(NotACheckpointError):
            jobs.check(store.url, 1.0)
    store.fails("put", count_uploads() + 1, how=how)
    ranks.run(2, jobs.save, store.url, 1.0)
    jobs.check(store.url, 1.0)


@backends.both_in_proof
def test_faults_that_pass_are_tried_again(ranks: Ranks, store: Store) -> None:
    """One failure each of an upload, a listing, a read and a deletion does not end a save or a load."""
    for kind in ("put", "list", "delete"):
        store.fails(kind, 1, 1, "after")
        store.fails(kind, 2, 2, "before")
    ranks.run(2, jobs.save, store.url, 1.0)
    assert not [name for name in store.names() if name.startswith(".shardckpt")]
    store.works()
    for kind in ("read", "list"):
        store.fails(kind, 1, 1)
        store.fails(kind, 3, 3)
    ranks.run(2, jobs.check, store.url, 1.0)


@backends.both_in_proof
def test_what_stays_down_is_an_error_after_bounded_attempts(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request is tried as often as SHARDCKPT_REMOTE_ATTEMPTS says, each failure logged; the error names it."""
    jobs.save(store.url, 1.0)
    monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "3")
    store.works()
    store.fails("read", 1)
    with pytest.raises(StorageError, match=r"cannot read at offset 0 of .*/c/metadata\.json in 3 attempts: Connection"):
        jobs.check(store.url, 1.0)
    assert len(store.requests("read")) == 3
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    store.fails("list", 1)
    with pytest.raises(StorageError, match=rf"cannot list {store.url} in 3 attempts"):
        dc.check_is_distributed_checkpoint(store.url)


@backends.both_in_proof
def test_a_listing_that_lacks_an_object_ends_the_save(ranks: Ranks, store: Store) -> None:
    """A save is not committed unless the store lists every object; the error names object, rank and URL."""
    store.hides(backends.data_file(1))
    errors = ranks.run(2, jobs.error_of, jobs.save, store.url, 1.0)
    assert len(set(errors)) == 1
    assert f"{store.url}/{backends.data_file(1)}: rank 1 uploaded" in errors[0][1]
    assert "metadata.json" not in {request.name for request in store.requests("put")}
    store.works()
    assert store.names() <= {backends.data_file(1)}


@backends.both_in_proof
def test_a_save_that_cannot_clean_up_is_still_absent(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Where deletions fail too, what is left says that it is no checkpoint; overwrite=True deletes it later."""
    store.fails("put", 5)
    store.fails("delete", 1)
    kind, _ = jobs.error_of(jobs.save, store.url, 1.0)
    assert kind == "StorageError"
    assert "objects of a failed save may remain" in caplog.text
    store.works()
    left = store.names()
    assert backends.current().index in left
    with pytest.raises(IncompleteCheckpointError, match="is in progress or was interrupted"):
        jobs.check(store.url, 1.0)
    with pytest.raises(StorageError, match=rf"has {len(left)} objects? of a save that has not ended"):
        jobs.save(store.url, 2.0)
    assert store.names() == left
    (store.objects / backends.data_file(9)).touch()
    jobs.save(store.url, 2.0, overwrite=True)
    jobs.check(store.url, 2.0)
    assert not [result for result in verify_checkpoint(store.url) if result.foreign]


@backends.both_in_proof
def test_an_object_that_cannot_be_deleted_after_the_commit_is_no_failure(store: Store) -> None:
    """The save is whole when metadata.json is; what only said that it was under way is listed as foreign."""
    store.fails("delete", 1)
    os.environ[settings.REMOTE_ATTEMPTS] = "1"
    try:
        jobs.save(store.url, 1.0)
    finally:
        del os.environ[settings.REMOTE_ATTEMPTS]
    store.works()
    jobs.check(store.url, 1.0)
    assert [result.foreign for result in verify_checkpoint(store.url)].count(True) == 1


@backends.both_in_proof
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_saves_to_one_url_do_not_mix(store: Store, order: tuple[int, int]) -> None:
    """A save finds out that another has begun at its URL: only the later is committed, and stays whole."""
    first = dc.save(jobs.state(1.0), store.url, async_sharded_save=True)
    second = dc.save(jobs.state(2.0), store.url, async_sharded_save=True, overwrite=True)
    assert first is not None
    assert second is not None
    errors = {}
    for number in order:
        errors[number] = jobs.error_of((first, second)[number].execute_sync)
    assert errors[0][0] == "StorageError"
    assert f"{store.url}: another save has begun there" in errors[0][1]
    assert errors[1] == ("", "")
    jobs.check(store.url, 2.0)
    assert not [name for name in store.names() if name.startswith(".shardckpt")]


@pytest.fixture
def uploads(store: Store) -> Iterator[tuple[Upload, Upload, FileRecord]]:
    """A save of two ranks that have uploaded: both parts, and the second one's file."""
    folder = open_folder(store.url, get_plugin_manager())
    first, second = Upload(folder), Upload(folder)
    first.begin("a" * 32, overwrite=False)
    second.save_id = first.save_id
    (first.spool / "metadata.json").write_bytes(b"{}")
    (second.spool / "data").write_bytes(b"12345")
    second.put(["data"])
    yield first, second, FileRecord(name="data", size=5, rank=1, keys=1, digest="", segments="")
    first.close()
    second.close()


@backends.both_in_proof
def test_a_part_that_is_handed_over_is_not_deleted_by_its_rank(
    store: Store, uploads: tuple[Upload, Upload, FileRecord]
) -> None:
    """A rank that loses the others while the main rank commits leaves its objects: they may be a checkpoint's."""
    first, second, record = uploads
    second.hand_over()
    second.abort(main=False)
    first.commit([record])
    first.abort(main=True)
    assert store.names() == {"data", "metadata.json"}


@backends.both_in_proof
def test_a_save_whose_url_was_taken_at_the_last_moment_is_not_committed(
    store: Store, uploads: tuple[Upload, Upload, FileRecord]
) -> None:
    """Another save that has begun since the last upload, with files of the same names and sizes, is noticed."""
    first, second, record = uploads
    other = Upload(open_folder(store.url, get_plugin_manager()))
    other.begin("b" * 32, overwrite=True)
    (other.spool / "data").write_bytes(b"54321")
    other.put(["data"])
    with pytest.raises(StorageError, match="another save has begun there"):
        first.commit([record])
    first.abort(main=True)
    second.abort(main=False)
    (other.spool / "metadata.json").write_bytes(b"{}")
    other.commit([record])
    other.close()
    assert (store.objects / "data").read_bytes() == b"54321"
    assert store.names() == {"data", "metadata.json"}


@backends.both_in_proof
@pytest.mark.parametrize("marker", ["metadata.json", ".shardckpt-uploading-x"])
def test_other_saves_in_folders_below_are_nobodys_to_delete(store: Store, marker: str) -> None:
    """A save that fails leaves alone what other saves have in folders of its URL; overwrite=True is refused there."""
    folder = open_folder(store.url, get_plugin_manager())
    save = Upload(folder)
    save.begin("a" * 32, overwrite=False)
    for name in ("inner/deep/" + marker, "inner/deep/data/0", "mine/0"):
        (store.objects / name).parent.mkdir(parents=True, exist_ok=True)
        (store.objects / name).touch()
    other = Upload(folder)
    with pytest.raises(StorageError, match=r"has other saves in its folders, such as inner/deep/"):
        other.begin("b" * 32, overwrite=True)
    other.close()
    (save.spool / "mine").mkdir()
    (save.spool / "mine" / "metadata.json").write_text("of this strategy")
    save.put(["mine/metadata.json"])
    save.abort(main=True)
    left = {path.relative_to(store.objects).as_posix() for path in store.objects.rglob("*") if path.is_file()}
    assert left - {"mine/0"} == {f"inner/deep/{marker}", "inner/deep/data/0"}


@backends.both_in_proof
def test_a_tree_whose_upload_fails_is_absent(store: Store) -> None:
    """An upload into a folder that fails for good leaves no object, at any depth, and the next save succeeds."""
    tree = {"sharded_strategy": SaveTree()}
    for number in range(1, 8):
        store.fails("put", number)
        kind, text = jobs.error_of(jobs.save, store.url, 1.0, **tree)
        assert kind == "StorageError", number
        assert store.requests("put")[-1].name in text
        store.works()
        assert not [path for path in store.objects.rglob("*") if path.is_file()]
    jobs.save(store.url, 2.0, **tree)
    assert {request.name for request in store.requests("put")} >= {"arrays/weight/c/0/0/0", "index/all.json"}
    jobs.check(store.url, 2.0, sharded_strategy=LoadTree())


@backends.both_in_proof
@pytest.mark.parametrize("record", ["as it was", "damaged"])
def test_a_removal_of_a_tree_that_failed_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, record: str
) -> None:
    """After a failure at any deletion another call ends the removal; in folders only what the record names goes."""
    monkeypatch.setenv(settings.REMOTE_THREADS, "1")
    jobs.save(store.url, 1.0, sharded_strategy=SaveTree())
    folder = open_folder(store.url, get_plugin_manager())
    (store.objects / "arrays" / "notes").touch()
    if record == "damaged":
        (store.objects / "shardckpt.json").write_text("{}")
    store.forget()
    failed = 0
    for number in range(2, 20):  # the first is that of the marker
        monkeypatch.setenv(settings.REMOTE_ATTEMPTS, "1")
        store.fails("delete", number, number, how="after" if number % 2 else "before")
        try:
            delete_checkpoint(RemotePath(folder))
            break
        except StorageError:
            failed += 1
            store.works()
            assert (
                jobs.error_of(jobs.check, store.url, 1.0, sharded_strategy=LoadTree())[0] == "IncompleteCheckpointError"
            )
    left = {path.relative_to(store.objects).as_posix() for path in store.objects.rglob("*") if path.is_file()}
    if record == "damaged":
        assert "shardckpt.json does not say which are the checkpoint's" in caplog.text
        assert left == {"arrays/notes", "arrays/bias/c/0/0", "arrays/weight/c/0/0/0", "index/all.json"}
    else:
        assert left == {"arrays/notes"}
    assert failed > 1


@backends.both_in_proof
def test_a_spool_directory_that_is_not_there_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """SHARDCKPT_SPOOL_DIR says where files wait for their upload; an error names it, and nothing is left."""
    monkeypatch.setenv(settings.SPOOL_DIR, "/no/such/place")
    with pytest.raises(StorageError, match=r"cannot make a spool directory in /no/such/place: .*\(ENOENT\)"):
        jobs.save(store.url, 1.0)
    assert not store.names()
