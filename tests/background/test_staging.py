from __future__ import annotations

import errno
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt.background import staging_buffer
from shardckpt.background.queue import AsyncCallsQueue
from shardckpt.background.staging import release_memory, stage
from shardckpt.background.staging_buffer import StagingBufferPool
from shardckpt.errors import CheckpointingException, ShardingError, StorageError
from shardckpt.manager import AsyncMode, CheckpointConfig, CheckpointManager
from tests.manager.training import Progress
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path


class _Work:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)
        self.keys = [f"key{number}" for number in range(len(tensors))]

    def write(self, _: Any) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.tensors]


def test_staging_copies_and_uses_its_memory_again() -> None:
    """Staged tensors keep their values when the originals change; the next save gets the same memory."""
    release_memory()
    values = torch.arange(12.0).reshape(3, 4)
    staged = stage(_Work(values.t(), values[1], torch.tensor(True), torch.zeros(0, dtype=torch.float8_e4m3fn)))
    expected = [values.t().clone(), values[1].clone(), torch.tensor(True), torch.zeros(0, dtype=torch.float8_e4m3fn)]
    values.zero_()
    with staged.open() as work:
        found = work.write(None)
    assert [tensor.dtype for tensor in found] == [tensor.dtype for tensor in expected]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(found, expected, strict=True))
    path = staged.path
    staged.release()
    again = stage(_Work(values))
    assert again.path == path
    again.release()


def test_staged_work_that_is_forgotten_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that was staged and dropped does not keep the next save waiting; in use, it keeps its memory."""
    monkeypatch.setenv("SHARDCKPT_STAGED_SAVES", "1")
    for value in range(3):
        staged = stage(_Work(torch.full((4,), float(value))))
        with staged.open() as work:
            assert work.write(None)[0].eq(value).all()
        del staged, work


def test_waiting_for_memory_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A save that waits for another's memory says so from time to time, and goes on when it is free."""
    monkeypatch.setenv("SHARDCKPT_STAGED_SAVES", "1")
    monkeypatch.setattr(staging_buffer, "_PATIENCE", 0.05)
    pool = StagingBufferPool()
    first = pool.acquire(10)
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(pool.acquire, 10)
        while "has waited" not in caplog.text:
            assert not second.done()
        pool.release(first)
        assert second.result(10) is first


def test_a_tensor_without_memory_is_named() -> None:
    """What cannot be copied is an error with its key, and the staging memory is free again."""
    with pytest.raises(ShardingError, match=r"'key1'.*no memory"):
        stage(_Work(torch.ones(2), torch.empty(3, device="meta")))
    for _ in range(3):
        stage(_Work(torch.ones(2))).release()


def test_staging_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more buffers exist than saves may be staged; one that is too small goes before a larger one comes."""
    monkeypatch.setenv("SHARDCKPT_STAGED_SAVES", "1")
    pool = StagingBufferPool()
    small = pool.acquire(10)
    pool.release(small)
    large = pool.acquire(small.nbytes + 1)
    assert large is not small
    pool.release(large)
    assert pool.acquire(5) is large
    pool.release(large)
    pool.clear()


def test_memory_that_the_system_does_not_give_is_an_error_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a limit of the process allows no more (ulimit -v), the error has the size, and no open file is left."""
    made: list[int] = []

    def make_file() -> tuple[int, str]:
        made.append(os.open(os.devnull, os.O_RDWR))
        return made[-1], "/proc/1/fd/1"

    def refuse(*_: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(staging_buffer, "_memory_file", make_file)
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)
    monkeypatch.setattr(mmap, "mmap", refuse)
    pool = StagingBufferPool()
    with pytest.raises(StorageError, match=r"take 6291456 bytes of staging memory.*Cannot allocate"):
        pool.acquire(5 << 20)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0])


@table("has", ["nothing", "another's files"])
def test_without_proc_a_process_is_refused(tmp_path: Path, has: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other process can map staged tensors, the error is that of the constructor, and a thread works."""
    if has != "nothing":
        (tmp_path / "proc" / str(os.getpid()) / "fd").mkdir(parents=True)
        for number in range(200):
            (tmp_path / "proc" / str(os.getpid()) / "fd" / str(number)).touch()
    monkeypatch.setattr(staging_buffer, "_PROC", tmp_path / "proc")
    for make in (
        lambda: AsyncCallsQueue(persistent=True),
        lambda: CheckpointManager(
            CheckpointConfig(folder=tmp_path / "a", async_mode=AsyncMode.ASYNC_WITH_PINNED_MEM), {"p": Progress()}
        ),
    ):
        with pytest.raises(CheckpointingException, match=r"(?s)proc.*Mount /proc.*async_mode='async'"):
            make()
    config = CheckpointConfig(folder=tmp_path / "b", interval=1, async_mode=AsyncMode.ASYNC)
    with CheckpointManager(config, {"p": Progress()}) as manager:
        manager.save(1)
        manager.wait()
        assert manager.steps() == [1]
