from __future__ import annotations

import logging
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from obstore.exceptions import InvalidPathError
from obstore.store import LocalStore, MemoryStore

from shardckpt import dist_checkpointing as dc
from shardckpt.commit.claim import CLAIM, Claim
from shardckpt.commit.upload import Upload, open_stream
from shardckpt.errors import StorageError
from shardckpt.integrations.obstore.folder import ObstoreFolder
from shardckpt.integrations.obstore.folder import open_folder as open_url
from shardckpt.maintenance import convert_checkpoint
from shardckpt.maintenance.proof import StagedProof
from shardckpt.maintenance.sources import open_any
from shardckpt.manifest import MARKER_NAME
from shardckpt.storage import CheckpointWriter
from shardckpt.storage.remote import RemotePath
from tests import backends
from tests.remote import jobs
from tests.remote.obstore import MIB, folder, serving, url
from tests.states import entire
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["folder", "url"]  # fixtures


def test_the_record_of_a_streamed_file_is_that_of_a_local_one(folder: ObstoreFolder, tmp_path: Path) -> None:
    """Bytes, digests and SHA-256 of a file do not depend on whether it is streamed."""
    records, large = [], torch.arange(9 * MIB, dtype=torch.uint8)
    for store in (None, folder):
        with CheckpointWriter(tmp_path / str(len(records)), 0, sha256=True, store=store) as writer:
            writer.directory.mkdir()
            file = writer.create("data.bin")
            file.append_small([b"head", b"er"])
            file.append(large.nbytes, lambda: [memoryview(large.numpy())])
            file.append(3, lambda: [memoryview(b"end")])
            records.append((writer.finish(file), writer.sha256, writer.recorded_files()))
    assert records[0] == records[1]
    local = (tmp_path / "0" / "data.bin").read_bytes()
    assert folder.read("data.bin", 0, len(local) + 1) == local


def test_a_stream_whose_thread_cannot_start_says_so(
    folder: ObstoreFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process without room for a thread gets that error when it gives the object up, and leaves nothing."""

    def start(thread: threading.Thread) -> None:
        if thread.name == "shardckpt-stream":
            raise RuntimeError("can't start new thread")
        begin(thread)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    large = torch.zeros(40 * MIB, dtype=torch.uint8)
    with (
        pytest.raises(StorageError, match=r"cannot write objects://.*/data\.bin: RuntimeError: can't start new thread"),
        CheckpointWriter(tmp_path, 0, store=folder) as writer,
    ):
        writer.create("data.bin").append(large.nbytes, lambda: [memoryview(large.numpy())])
    assert folder.tree() == {}


@table(
    "error, left",
    [(RuntimeError("can't start new thread"), "can't start new thread"), (KeyboardInterrupt(), "")],
)
def test_a_stream_that_did_not_start_publishes_nothing(
    folder: ObstoreFolder, monkeypatch: pytest.MonkeyPatch, error: BaseException, left: str
) -> None:
    """After a failed start no object is completed; after Ctrl-C in a start, no thread is left to send one."""

    def start(thread: threading.Thread) -> None:
        if isinstance(error, KeyboardInterrupt):
            begin(thread)  # it comes while the caller waits for the thread to run
            threads.append(thread)
        raise error

    begin, threads = threading.Thread.start, list[threading.Thread]()
    stream = folder.open_write("data.bin", 5 * MIB)
    part = memoryview(bytes(5 * MIB))
    stream.write(part)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        with pytest.raises(type(error)):
            stream.write(part)
    if left:
        with pytest.raises(RuntimeError, match=left):
            stream.close()
    stream.abort()
    assert not any(thread.is_alive() for thread in threads)
    assert folder.tree() == {}


@table("kind", ["memory", "local"])
def test_the_abilities_of_a_folder(kind: str, tmp_path: Path) -> None:
    """Objects are created once, read by ranges into memory, listed at any depth, and deleted together."""
    found = ObstoreFolder("objects://b/c", MemoryStore() if kind == "memory" else LocalStore(tmp_path), "c")
    assert found.tree() == found.files() == {}
    found.create("a", b"first")
    with pytest.raises(FileExistsError):
        found.create("a", b"second")
    stream = found.open_write("d/e", 5 * MIB)
    stream.write(memoryview(b"12345"))
    assert "d/e" not in found.tree()
    stream.close()
    assert found.tree() == {"a": 5, "d/e": 5}
    assert found.files() == {"a": 5}
    assert found.folders() == ["d"]
    buffer = bytearray(9)
    assert found.read_into("d/e", 2, memoryview(buffer)) == 3
    assert buffer[:3] == b"345"
    assert found.read("a", 5, 4) == b""
    with pytest.raises(FileNotFoundError):
        found.read("gone", 0, 1)
    found.delete_many(["a", "gone", "d/e"])
    assert found.tree() == {}


@pytest.mark.parametrize("kind", ["memory", "local", "s3"])
def test_a_long_range_arrives_in_pieces(
    kind: str, folder: ObstoreFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range of several pieces fills the buffer to its end or the object's, and is never asked for as a whole."""
    if kind != "s3":
        folder = ObstoreFolder("objects://b/c", MemoryStore() if kind == "memory" else LocalStore(tmp_path), "c")
    data = random.Random(0).randbytes(3 * MIB + 12_345)
    folder.create("a", data)
    monkeypatch.setattr("obstore.get_range", lambda *_, **__: pytest.fail("the client would hold the whole range"))
    buffer = bytearray(2 * MIB + 7)
    assert folder.read_into("a", 5, memoryview(buffer)) == len(buffer)
    assert buffer == data[5 : 5 + len(buffer)]
    assert folder.read_into("a", 2 * MIB, memoryview(buffer)) == MIB + 12_345
    assert buffer[: MIB + 12_345] == data[2 * MIB :]
    assert folder.read_into("a", len(data), memoryview(buffer)) == 0
    with pytest.raises(FileNotFoundError):
        folder.read_into("gone", 0, memoryview(buffer))


def test_a_claim_that_is_gone_when_it_is_read_is_taken() -> None:
    """A save whose predecessor ends between the two requests begins, and gives back what is there."""

    class Ending(ObstoreFolder):
        """Has no claim any more when one is read."""

        def read(self, name: str, offset: int, nbytes: int) -> bytes:
            if name == CLAIM:
                self.delete(name)
            return super().read(name, offset, nbytes)

    found = Ending("objects://b/c", MemoryStore(), "c")
    found.create(CLAIM, b"another's")
    claim = Claim(RemotePath(found), "0" * 32)
    claim.take()
    assert found.files().keys() == {CLAIM}
    assert claim.list_own({CLAIM}) == [claim.in_progress]


def test_of_two_saves_that_begin_at_once_one_wins(folder: ObstoreFolder) -> None:
    """Two saves that both see an empty URL do not mix: one is complete, the other's error names the first."""
    together = threading.Barrier(2, timeout=30)

    class Meeting(ObstoreFolder):
        """Lists when both have come; once."""

        met = False

        def tree(self) -> dict[str, int]:
            found = super().tree()
            if not self.met:
                self.met = True
                together.wait()
            return found

    with serving(lambda url: Meeting(url, folder._store, "race")) as url, ThreadPoolExecutor(2) as threads:
        saves = [threads.submit(jobs.save, url, value) for value in (1.0, 2.0)]
        ended = [save.exception() for save in saves]
    with serving(lambda url: ObstoreFolder(url, folder._store, "race")) as url:
        jobs.check(url, 1.0 if ended[0] is None else 2.0)
    assert ended.count(None) == 1
    error = next(error for error in ended if error is not None)
    assert isinstance(error, StorageError)
    assert "another save has begun there at the same time ('save " in str(error)
    assert f"of process {os.getpid()} on " in str(error)


def test_a_save_that_has_seen_an_empty_url_does_not_write_over_one_that_has_ended_since(folder: ObstoreFolder) -> None:
    """Between a save's first listing and its claim another save begins and ends: that one stays whole."""

    class Stalled(ObstoreFolder):
        """Stands still after its first listing, until another save has ended."""

        stalled = False

        def tree(self) -> dict[str, int]:
            found = super().tree()
            if not self.stalled:
                self.stalled = True
                with serving(lambda url: ObstoreFolder(url, folder._store, "ended")) as other:
                    jobs.save(other, 1.0)
            return found

    with (
        serving(lambda url: Stalled(url, folder._store, "ended")) as url,
        pytest.raises(StorageError, match=r"another save has begun there \(save [0-9a-f]{32}\)"),
    ):
        jobs.save(url, 2.0)
    with serving(lambda url: ObstoreFolder(url, folder._store, "ended")) as url:
        jobs.check(url, 1.0)


def test_a_marker_that_another_save_has_written_is_never_replaced(folder: ObstoreFolder) -> None:
    """A save whose place was taken before its last step fails, names the other, and deletes nothing of it."""
    jobs.save(folder.url, 1.0)
    objects = {name: folder.read(name, 0, size) for name, size in folder.tree().items()}

    class Late(ObstoreFolder):
        """Another save's objects appear just before the marker."""

        def create(self, name: str, data: bytes) -> None:
            if name == MARKER_NAME:
                for other, content in objects.items():
                    self.delete(other) if other in self.tree() else None
                    super().create(other, content)
            super().create(name, data)

    with serving(lambda url: Late(url, folder._store, "late")) as url:
        with pytest.raises(StorageError, match=r"another save has begun there \(save [0-9a-f]{32}\)"):
            jobs.save(url, 2.0)
        jobs.check(url, 1.0)


def test_what_a_killed_save_left_is_named_and_overwritten(folder: ObstoreFolder) -> None:
    """A claim without a checkpoint is refused with who has left it; overwrite=True takes the place."""
    dead = Upload(folder)
    dead.begin("0" * 32, overwrite=False)
    dead.close()
    with pytest.raises(StorageError, match=rf"has not ended \('save 0+ of process {os.getpid()} on .*overwrite=True"):
        jobs.save(folder.url, 1.0)
    jobs.save(folder.url, 2.0, overwrite=True)
    jobs.check(folder.url, 2.0)
    assert not [name for name in folder.tree() if name.startswith(".shardckpt")]
    dead.abort(main=True)  # as if it had only been slow: it deletes nothing of the other
    jobs.check(folder.url, 2.0)


def test_a_save_whose_place_was_taken_replaces_nothing(folder: ObstoreFolder, tmp_path: Path) -> None:
    """A save that goes on after another has taken its URL by overwrite=True fails before its object appears."""
    slow = Upload(folder)
    slow.begin("1" * 32, overwrite=False)
    with CheckpointWriter(tmp_path, 0, store=open_stream(folder, "1" * 32)) as writer:
        file = writer.create(backends.data_file(0))
        file.append_small([b"slow"])
        jobs.save(folder.url, 2.0, overwrite=True)
        with pytest.raises(StorageError, match="another save has begun there"):
            writer.finish(file)
    slow.abort(main=True)
    jobs.check(folder.url, 2.0)


def test_a_store_that_ignores_conditions_is_recognised(folder: ObstoreFolder, caplog: Any) -> None:
    """A server that answers a conditional create of what is there with success is found out, and saves still work."""

    class Careless(ObstoreFolder):
        """Creates always."""

        def create(self, name: str, data: bytes) -> None:
            stream = self.open_write(name, len(data))
            stream.write(memoryview(data))
            stream.close()

    with serving(lambda url: Careless(url, folder._store, "x")) as url, caplog.at_level(logging.WARNING):
        jobs.save(url, 1.0)
        jobs.check(url, 1.0)
    assert "ignores conditions of writes" in caplog.text


def test_a_load_asks_for_no_head_of_an_archive(folder: ObstoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests say that archives of large tensors begin as we write them: a load reads each by one request."""
    tensors = {f"w{n}": torch.full((1 << 19,), float(n)) for n in range(4)}
    dc.save(entire(tensors), "objects://bucket", "torch_dist")
    requests: list[tuple[str, int]] = []
    read_into = ObstoreFolder.read_into

    def note(self: ObstoreFolder, name: str, offset: int, buffer: memoryview) -> int:
        requests.append((name, buffer.nbytes))
        return read_into(self, name, offset, buffer)

    monkeypatch.setattr(ObstoreFolder, "read_into", note)
    loaded = entire({key: torch.zeros(1 << 19) for key in tensors})
    dc.load(loaded, "objects://bucket")
    assert all(torch.equal(loaded[key].data, tensor) for key, tensor in tensors.items())
    assert [nbytes for name, nbytes in requests if name.endswith(".distcp")] == [2 * MIB] * 4


@table("to", ["torch_dist", "safetensors", "dcp", "hf"])
def test_a_conversion_to_a_store_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    """No tensor is on the local disk when what was written is read again; a copy in the same format is one, too."""
    (spool := tmp_path / "spool").mkdir()
    monkeypatch.setenv("SHARDCKPT_SPOOL_DIR", str(spool))
    dc.save(entire({"w": torch.randn(64, 1024), "b": torch.randn(8)}), tmp_path / "old")
    make, spooled, store = StagedProof.make, [], MemoryStore()

    def make_and_look(proof: StagedProof, *args: Any) -> None:
        spooled.append(sum(path.stat().st_size for path in spool.rglob("*") if path.is_file()))
        make(proof, *args)

    monkeypatch.setattr(StagedProof, "make", make_and_look)
    with serving(lambda url: ObstoreFolder(url, store, url.partition("://")[2])):
        report = convert_checkpoint(tmp_path / "old", f"objects://bucket/{to}", to, memory_budget=64 * MIB)
        with open_any(tmp_path / "old") as old, open_any(f"objects://bucket/{to}") as new:
            assert sorted(new) == sorted(old) == sorted(proof.key for proof in report.proof) == ["b", "w"]
            assert all(torch.equal(new[key].read(), old[key].read()) for key in old)
    assert len(spooled) == 1
    assert spooled[0] < 16 << 10
    assert list(spool.iterdir()) == []


def test_small_objects_are_sent_together(folder: ObstoreFolder, tmp_path: Path) -> None:
    """Small files that were begun are on their way at a time: each waits here until all have begun to be sent."""
    together = threading.Barrier(3, timeout=20)

    class Meeting(ObstoreFolder):
        def open_write(self, name: str, part_bytes: int) -> Any:
            writer = super().open_write(name, part_bytes)
            close = writer.close

            def meet() -> None:
                together.wait()
                close()

            writer.close = meet  # type: ignore[method-assign]
            return writer

    store = Meeting("objects://bucket", MemoryStore(), "c")
    with CheckpointWriter(tmp_path, 0, store=store) as writer:
        begun = [writer.begin(name, name.encode()) for name in ("a", "b", "d")]
        records = [writer.finish(file) for file in begun]
    assert [(record.name, record.size) for record in records] == [("a", 1), ("b", 1), ("d", 1)]
    assert store.files() == {"a": 1, "b": 1, "d": 1}


def test_a_client_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """URLs of one bucket share a client and its connections; another endpoint or key makes another one."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "one")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    first = open_url("s3://b/c")._store
    assert open_url("s3://b/d/e")._store is first
    assert open_url("s3://other/c")._store is not first
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "two")
    assert open_url("s3://b/c")._store is not first


def test_without_another_client_the_object_is_named(folder: ObstoreFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fsspec has no package for the protocol, the error has the key, and says to remove it or what to install."""

    def refuse(*_: object) -> None:
        raise InvalidPathError('Path "run//notes.txt" contained empty path segment')

    monkeypatch.setattr("obstore.list_with_delimiter", refuse)
    with pytest.raises(StorageError, match=r"run//notes\.txt.*remove the object, or install.*s3fs"):
        folder.folders()
