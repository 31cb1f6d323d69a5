"""The contract's part about the results of a save: files with digests, durable, and nothing else."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from shardckpt import dist_checkpointing
from shardckpt.errors import CheckpointingException
from shardckpt.maintenance.verify import verify_checkpoint
from shardckpt.manifest.names import MARKER_NAME, RECORD_NAME
from shardckpt.strategy import ChecksFiles, RemovesKeys
from shardckpt.testing.checks import check, check_same
from shardckpt.testing.contract import jobs
from shardckpt.testing.contract.claims import Claims
from shardckpt.testing.contract.rewriting import open_reader, read_record
from shardckpt.testing.contract.shards import make_tensor, whole_shard

#: Seconds in which a thread that has nothing to do must have ended.
_THREAD_SECONDS = 10.0


class FileTests(Claims):
    """Files, descriptors, threads."""

    def test_every_file_is_recorded(self, path: Path) -> None:
        """Every file of a save is recorded with size and digests, and `shardckpt verify` finds no fault."""
        self.save_version(path, 1)
        record = read_record(path)
        names = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()} - {MARKER_NAME, RECORD_NAME}
        check({file.name for file in record.files} == names, f"on disk are {sorted(names)}, recorded are others")
        check(all(file.digest for file in record.files), "a file is recorded without a digest")
        faults = [(result.name, result.fault) for result in verify_checkpoint(path) if result.fault or result.foreign]
        check(not faults, f"verify finds {faults}")

    def test_every_file_is_synced(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every file is fsynced, with all its bytes, before the checkpoint appears: a power failure loses none."""
        synced: dict[int, int] = {}

        def record(real: object, fd: int) -> None:
            found = os.fstat(fd)
            synced[found.st_ino] = found.st_size
            real(fd)  # type: ignore[operator]

        for name in ("fsync", "fdatasync"):
            real = getattr(os, name, None)
            if real is not None:
                monkeypatch.setattr(os, name, lambda fd, real=real: record(real, fd))
        self.save_version(path, 1)
        for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
            found = file.stat()
            check(found.st_ino in synced, f"{file.name} was never fsynced: a power failure may leave it empty")
            check(synced[found.st_ino] == found.st_size, f"{file.name} was written to after its fsync")

    def test_nothing_is_left_elsewhere(self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A save and a load leave nothing next to the checkpoint, in the working directory or among temporary files."""
        for name in ("work", "temporary"):
            (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / "work")
        monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
        monkeypatch.setattr(tempfile, "tempdir", None)
        self.save_version(path, 1)
        before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
        self.check_version(path, 1)
        for folder in (tmp_path / "work", tmp_path / "temporary"):
            check(not list(folder.iterdir()), f"left in the {folder.name} directory: {[*folder.iterdir()]}")
        check([entry.name for entry in path.parent.iterdir()] == [path.name], "a file was left next to the checkpoint")
        check(
            {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before, "a load has changed the checkpoint"
        )

    def test_nothing_stays_open(self, path: Path) -> None:
        """After a save and a load no more files of the checkpoint are open, and no more threads run, than before."""
        if not Path("/proc/self/fd").exists():
            pytest.skip("open files are listed by Linux only")
        for value in (1, 2):  # files that are opened once stay open
            self.save_version(path, value, overwrite=True)
            self.check_version(path, value)
        gc.collect()
        before, threads = _open_files(path.parent), threading.enumerate()
        for value in (3, 4, 5):
            self.save_version(path, value, overwrite=True)
            self.check_version(path, value)
        gc.collect()
        left = _open_files(path.parent) - before
        check(not left, f"files stay open after a save and a load: {sorted(left)}")
        begun = [thread for thread in threading.enumerate() if thread not in threads]
        for thread in begun:
            thread.join(_THREAD_SECONDS)  # the core's thread that looks at long phases ends when there is none
        running = [thread for thread in begun if thread.is_alive()]
        check(not running, f"threads go on after a save and a load: {running}")

    def test_an_overwrite_replaces_everything(self, path: Path) -> None:
        """After an overwrite nothing of the old save is there: no key, no file."""
        tensors = {f"k{n}": make_tensor(f"k{n}", torch.float32) for n in range(5)}
        self.subject.save({"t": [whole_shard(key, tensor) for key, tensor in tensors.items()], "old": 1}, path)
        before = self.subject.load({"t": whole_shard("k3", tensors["k0"].clone())}, path)
        check_same(before["t"], tensors["k3"], "before the overwrite, 'k3'")
        self.subject.save({"t": whole_shard("k3", tensors["k4"]), "new": 2}, path, overwrite=True)
        check([*dist_checkpointing.load_tensors_metadata(path)] == ["k3"], "keys of the old save are still there")
        loaded = self.subject.load({"t": whole_shard("k3", tensors["k3"].clone())}, path)
        check_same(loaded["t"], tensors["k4"], "'k3'")
        check("old" not in loaded, "the common state of the old save is still there")
        foreign = [result.name for result in verify_checkpoint(path) if result.foreign]
        check(not foreign, f"files of the old save are still there: {foreign}")

    def test_a_full_disk(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whichever file cannot be made durable, the old checkpoint or the new is there, and the error is raised."""
        self.save_version(path, 1)
        with monkeypatch.context() as patch:
            counted = _fail_fsync(patch, 1 << 30)
            self.save_version(path.with_name("other"), 2)
        for number in range(1, next(counted)):
            with monkeypatch.context() as patch:
                _fail_fsync(patch, number)
                kind, _ = jobs.error_of(self.save_version, path, 3, overwrite=True)
            found = int(self.load_version(path)["step"])  # after the commit the folder above is synced: 3 is there
            check(found == 3 or (kind and found == 1), f"fsync {number} failed with {kind!r}: step {found} is there")
            self.check_version(path, found)
            left = sorted(entry.name for entry in path.parent.iterdir())
            check(found == 3 or left == ["checkpoint", "other"], f"the failure of fsync {number} has left {left}")
            self.save_version(path, 1, overwrite=True)

    def test_removing_keys(self, path: Path) -> None:
        """Remove takes out the keys with a prefix, and leaves every other key bit for bit."""
        self.require("removes_keys")
        check(isinstance(self.subject.make_loader(), RemovesKeys), "removes_keys = True, and there is no method remove")
        tensors = {
            f"{part}.{n}": make_tensor(f"{part}.{n}", torch.float32) for part in ("model", "optimizer") for n in (0, 1)
        }
        self.subject.save({"t": [whole_shard(key, tensor) for key, tensor in tensors.items()], "step": 5}, path)
        report = dist_checkpointing.remove_sharded_tensors(path, "optimizer.")
        check(set(report.keys) == {"optimizer.0", "optimizer.1"}, f"the report names {report.keys}")
        check(set(dist_checkpointing.load_tensors_metadata(path)) == {"model.0", "model.1"}, "wrong keys are left")
        wanted = [whole_shard(f"model.{n}", tensors["model.0"].clone().zero_()) for n in (0, 1)]
        loaded = self.subject.load({"t": wanted}, path)
        for number, value in enumerate(loaded["t"]):
            check_same(value, tensors[f"model.{number}"], f"'model.{number}'")
        check(loaded["step"] == 5, "the common state is gone")

    def test_checks_without_digests(self, path: Path) -> None:
        """list_files names the checkpoint's files, and check_files finds a data file that is gone or cut."""
        self.require("checks_files")
        self.save_version(path, 1)
        loader = self.subject.make_loader()
        if not isinstance(loader, ChecksFiles):
            check(condition=False, message="checks_files = True, and there are no methods list_files and check_files")
            return
        names = {file.name for file in read_record(path).files}
        with open_reader(path) as reader:
            listed = {file.name: file for file in loader.list_files(reader)}
            faults = {name: fault for name, fault in loader.check_files(reader).items() if fault is not None}
        check(set(listed) == names, f"list_files names {sorted(listed)}, and the checkpoint has {sorted(names)}")
        check(not faults, f"check_files finds faults in a checkpoint that was just saved: {faults}")
        for name in (name for name, file in listed.items() if file.keys):
            content = (path / name).read_bytes()
            for what, left in (("gone", None), ("cut in half", content[: len(content) // 2])):
                (path / name).unlink(missing_ok=True)
                if left is not None:
                    (path / name).write_bytes(left)
                check({name, ""} & _structure_faults(loader, path), f"{name} is {what}, and check_files finds no fault")
                with open_reader(path) as reader:
                    again = {file.name for file in loader.list_files(reader)}
                check(again == names, f"{name} is {what}, and list_files, which reads the index only, names {again}")
            (path / name).write_bytes(content)


def _open_files(folder: Path) -> set[str]:
    """Return the open files of this process in a folder: those elsewhere change with the threads of other tests."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor by which the folder is listed
            path = link.readlink()
            if path.is_relative_to(folder.resolve()):
                found.add(f"{link.name}: {path}")
    return found


def _fail_fsync(patch: pytest.MonkeyPatch, number: int) -> itertools.count[int]:
    """Let a call of fsync fail, counted from 1, in any thread; return the counter."""
    counted, real = itertools.count(1), os.fsync

    def fsync(fd: int) -> None:
        if next(counted) == number:
            raise OSError(28, "No space left on device")
        real(fd)

    patch.setattr(os, "fsync", fsync)
    return counted


def _structure_faults(loader: ChecksFiles, path: Path) -> set[str]:
    """Return the names of the files in which a check without digests finds faults; "" stands for the checkpoint."""
    try:
        with open_reader(path, with_record=False) as reader:
            return {name for name, fault in loader.check_files(reader).items() if fault is not None}
    except CheckpointingException:
        return {""}
