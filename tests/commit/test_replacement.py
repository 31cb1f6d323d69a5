"""An overwrite on a store that ends at any of its requests; stores in memory, so that every request is tried."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from shardckpt import dist_checkpointing as dc
from shardckpt.commit import Owner
from shardckpt.commit.removal import delete_checkpoint
from shardckpt.engine.pruning import prune_leftovers
from shardckpt.errors import CheckpointingException, CheckpointReplacedError, CorruptCheckpointError, StorageError
from shardckpt.integrations.fsspec.folder import open_folder as open_by_fsspec
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.maintenance import verify_checkpoint
from shardckpt.plugins import get_plugin_manager, hookimpl
from shardckpt.plugins.stores import open_folder
from shardckpt.storage import RemotePath
from tests.commit import owners
from tests.commit.replacement import LATER, NEW, OLD, Place, generations, place, versions
from tests.remote import jobs

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["place"]  # fixtures


def test_of_two_overwrites_one_wins(place: Place) -> None:
    """An overwrite that begins while another goes on wins; the first fails, names it, and takes nothing away."""
    jobs.save(place.url, OLD)
    first = dc.save(jobs.state(NEW), place.url, async_sharded_save=True, overwrite=True)
    second = dc.save(jobs.state(LATER), place.url, async_sharded_save=True, overwrite=True)
    assert first is not None
    assert second is not None
    kind, text = jobs.error_of(first.execute_sync)
    assert kind == "StorageError"
    assert f"{place.url}: another save has begun there ('save " in text
    assert f"of process {Owner.current().pid} on " in text
    assert versions(place.url) == [OLD]
    assert jobs.error_of(second.execute_sync) == ("", "")
    assert versions(place.url) == [LATER]
    assert not [name for name in place.folder().tree() if ".shardckpt" in name]
    assert len(generations(place)) == 2


def test_a_marker_that_was_switched_meanwhile_is_not_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a store has conditions, a save that is overruled after its last look still replaces nothing."""
    if place.kind != "obstore":
        pytest.skip("a store without conditions: there the claims decide")
    jobs.save(place.url, OLD)
    replace, calls = ObstoreFolder.replace, []

    def late(self: ObstoreFolder, name: str, data: bytes, tag: Any) -> None:
        calls.append(name)
        if len(calls) == 1:
            jobs.save(place.url, LATER, overwrite=True)
        replace(self, name, data, tag)

    monkeypatch.setattr(ObstoreFolder, "replace", late)
    kind, text = jobs.error_of(jobs.save, place.url, NEW, overwrite=True)
    assert kind == "StorageError"
    assert "another save has begun there (save " in text
    assert versions(place.url) == [LATER]
    assert len(generations(place)) == 2


def test_another_living_process_is_not_overruled(place: Place) -> None:
    """While a process of this host overwrites, another's overwrite is refused, and the error says who goes on."""
    jobs.save(place.url, OLD)
    with owners.alive() as owner:
        said = f"save {'5' * 32} of process {owner.pid} on host, begun 2026-01-01 00:00:00 UTC\nowner {owner.text}\n"
        (RemotePath(place.folder()) / f".shardckpt-uploading-{'5' * 32}").write(said.encode())
        kind, text = jobs.error_of(jobs.save, place.url, NEW, overwrite=True)
    assert kind == "StorageError"
    assert f"another save is under way there ('save {'5' * 32} of process {owner.pid} on host" in text
    assert versions(place.url) == [OLD]
    jobs.save(place.url, NEW, overwrite=True)  # it is dead
    assert versions(place.url) == [NEW]
    assert not [name for name in place.folder().tree() if ".shardckpt" in name]


def test_what_may_live_elsewhere_is_overruled_and_left_to_a_prune(place: Place) -> None:
    """A save of another host does not block the next; its objects stay until they count as dead."""
    jobs.save(place.url, OLD)
    mark, other = f".shardckpt-uploading-{'5' * 32}", f"generation-{'5' * 32}/data"
    said = f"save {'5' * 32} of process 1 on host, begun 2026-01-01 00:00:00 UTC\nowner {owners.elsewhere().text}\n"
    for name, data in ((mark, said.encode()), (other, b"12345")):
        (RemotePath(place.folder()) / name).write(data)
    jobs.save(place.url, NEW, overwrite=True)
    assert {mark, other} <= place.folder().tree().keys()
    assert prune_leftovers(place.url)[0].kept
    assert [result.is_removed for result in prune_leftovers(place.url, 0)] == [True]
    assert not {mark, other} & place.folder().tree().keys()
    assert versions(place.url) == [NEW]


def test_a_reader_of_the_old_save_begins_again(place: Place) -> None:
    """What was opened before an overwrite says that it was replaced; a load that is under way gets the new save."""
    for saves in (1, 2):
        for _ in range(saves):
            jobs.save(place.url, OLD, overwrite=True)
        with dc.open_checkpoint(place.url) as opened:
            jobs.save(place.url, NEW, overwrite=True)
            with pytest.raises(CheckpointReplacedError):
                _ = opened["weight"][:]
        assert versions(place.url) == [NEW]


def test_a_copied_prefix_is_the_checkpoint(place: Place, tmp_path: Path) -> None:
    """All objects, copied to a directory or another URL, load there, are verified, and may be overwritten again."""
    for value in (OLD, NEW):
        jobs.save(place.url, value, overwrite=True, verify_integrity=True)
    copy = RemotePath(open_folder("objects://bucket/elsewhere/copy", get_plugin_manager()))
    for name, size in place.folder().tree().items():
        data = place.folder().read(name, 0, size)
        assert b"bucket" not in data
        (tmp_path / "c" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / name).write_bytes(data)
        (copy / name).write(data)
    delete_checkpoint(RemotePath(place.folder()))
    for url in (copy.url, str(tmp_path / "c")):
        jobs.check(url, NEW, verify_integrity=True)
        assert not [result.fault for result in verify_checkpoint(url) if result.fault]
        if "://" not in url:  # keys are removed in directories alone
            with pytest.raises(CheckpointingException, match=r"has its files in generation-.*: remove keys from .*c/"):
                dc.remove_sharded_tensors(url, "weight")
        jobs.save(url, LATER, overwrite=True)
        jobs.check(url, LATER)
    assert not [path for path in (tmp_path / "c").iterdir() if path.is_dir()]


def test_a_generation_that_is_lost_is_damage(place: Place) -> None:
    """A marker that names what is not there, or no generation at all, is an error that says so, never another save."""
    for value in (OLD, NEW):
        jobs.save(place.url, value, overwrite=True)
    marker = RemotePath(place.folder()) / "metadata.json"
    said = marker.read_tagged()[0]
    marker.write(said.replace(b"generation-", b"../../etc-"))
    assert jobs.error_of(jobs.check, place.url, NEW)[0] == CorruptCheckpointError.__name__
    marker.write(said)
    generation = max(generations(place))
    (RemotePath(place.folder()) / f"{generation}/metadata.json").delete()
    kind, text = jobs.error_of(jobs.check, place.url, NEW)
    assert kind == CorruptCheckpointError.__name__
    assert f"metadata.json names {generation}, and that has no metadata.json: it was lost" in text
    assert jobs.error_of(jobs.save, place.url, NEW)[0] == StorageError.__name__


@pytest.mark.usefixtures("no_pauses")
def test_a_refused_overwrite_leaves_nothing_whatever_answer_was_lost(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save whose marker was created by a request without an answer, and which is then refused, takes all away."""
    if place.kind != "obstore":
        pytest.skip("a store without conditions: there the marker is written, and not created")
    jobs.save(place.url, OLD)
    create, replace, lost = ObstoreFolder.create, ObstoreFolder.replace, []

    def lose(self: ObstoreFolder, name: str, data: bytes) -> None:
        create(self, name, data)
        if name == "metadata.json" and not lost:
            lost.append(name)
            raise ConnectionResetError

    def late(self: ObstoreFolder, name: str, data: bytes, tag: Any) -> None:
        if len(lost) == 1:
            lost.append(name)
            jobs.save(place.url, LATER, overwrite=True)
        replace(self, name, data, tag)

    monkeypatch.setattr(ObstoreFolder, "create", lose)
    monkeypatch.setattr(ObstoreFolder, "replace", late)
    assert jobs.error_of(jobs.save, place.url, NEW, overwrite=True)[0] == StorageError.__name__
    assert len(lost) == 2
    assert versions(place.url) == [LATER]
    assert len(generations(place)) == 2


def test_a_refused_overwrite_leaves_no_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a store with folders an overwrite that fails removes the folder of its generation, too."""

    class Server:
        @hookimpl(tryfirst=True)
        def shardckpt_filesystem(self, url: str) -> Any:
            if not url.startswith("folders://"):
                return None
            found = open_by_fsspec(f"file://{tmp_path}{url.removeprefix('folders:/')}")
            assert found is not None
            found.url = url
            return found

    server = Server()
    get_plugin_manager().register(server)
    try:
        jobs.save("folders://step-1", OLD)
        with monkeypatch.context() as patch:
            patch.setattr("shardckpt.commit.replacement.Replacement.switch", lambda *_: 1 / 0)
            assert jobs.error_of(jobs.save, "folders://step-1", NEW, overwrite=True) != ("", "")
        assert versions("folders://step-1") == [OLD]
    finally:
        get_plugin_manager().unregister(server)
    assert not [path for path in tmp_path.rglob("*") if path.is_dir() and path.name != "step-1"]
