from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.background import staging_buffer
from shardckpt.background.staging import release_memory, stage
from shardckpt.background.staging_buffer import StagingBufferPool
from shardckpt.errors import CheckpointingException, ShardingError
from shardckpt.mapping import ShardedTensor
from shardckpt.strategy import SaveStrategy
from tests.background import jobs

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path


class _Work:
    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = list(tensors)
        self.keys = [f"key{number}" for number in range(len(tensors))]

    def write(self, _: Any) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.tensors]


class _Foreground(SaveStrategy):
    backend, version = "foreground", 1

    def save(self, *_: Any) -> None:
        raise AssertionError("never called")


def test_megatrons_convention_of_a_request() -> None:
    """The preloaded value takes the place of the second argument; finalize functions follow in order."""
    seen: list[Any] = []
    request = AsyncRequest(
        lambda first, second, third: seen.append((first, second, third)),
        ("a", None, "c"),
        [lambda: seen.append("one")],
        preload_fn=lambda: "b",
    )
    request.add_finalize_fn(lambda: seen.append("two"))
    request.execute_sync()
    assert seen == [("a", "b", "c"), "one", "two"]


def test_a_frozen_request_takes_no_finalize_function() -> None:
    """What is added after scheduling would never run: it is refused."""
    with pytest.raises(CheckpointingException, match="already scheduled"):
        AsyncRequest(None, (), []).freeze().add_finalize_fn(print)


def test_a_request_can_be_executed_in_the_foreground(tmp_path: Path) -> None:
    """execute_sync of a save gives the same checkpoint as the queue does."""
    request = dc.save(jobs.state(5.0), tmp_path / "c", async_sharded_save=True)
    assert request is not None
    assert not (tmp_path / "c").exists()
    request.execute_sync()
    jobs.check(str(tmp_path / "c"), 5.0)


def test_a_request_that_is_never_scheduled_is_no_checkpoint(tmp_path: Path) -> None:
    """Planning alone leaves nothing that loads, and does not keep the next save from its place."""
    dc.save(jobs.state(5.0), tmp_path / "c", async_sharded_save=True)
    with pytest.raises(CheckpointingException):
        dc.load(jobs.state(0.0), tmp_path / "c")
    dc.save(jobs.state(6.0), tmp_path / "c")
    jobs.check(str(tmp_path / "c"), 6.0)


def test_a_strategy_that_cannot_save_behind_the_training_is_named(tmp_path: Path) -> None:
    """async_sharded_save with a plain SaveStrategy is refused with its name, before anything is made."""
    with pytest.raises(CheckpointingException, match="_Foreground saves in the foreground only"):
        dc.save(jobs.state(1.0), tmp_path / "c", _Foreground(), async_sharded_save=True)
    assert not list(tmp_path.iterdir())


def test_closing_with_abort_leaves_nothing(tmp_path: Path) -> None:
    """Requests that are given up are absent, and so are their staging directories."""
    for persistent in (False, True):
        queue = AsyncCallsQueue(persistent)
        request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        queue.close(abort=True)
        assert queue.get_num_unfinalized_calls() == 0
        assert not list(tmp_path.iterdir())


def test_a_queue_left_by_an_error_keeps_what_one_process_has_staged(tmp_path: Path) -> None:
    """When the training of one process fails, what it had scheduled before is finished."""
    with pytest.raises(KeyError, match="training"), AsyncCallsQueue() as queue:  # noqa: PT012 - a training loop
        request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        raise KeyError("training")
    jobs.check(str(tmp_path / "c"), 1.0)


def test_one_failed_request_does_not_take_the_others_along(tmp_path: Path) -> None:
    """close() finalizes what is sound and raises what failed."""
    queue = AsyncCallsQueue()
    for name in ("a", "b", "c"):
        request = dc.save(jobs.state(1.0), tmp_path / name, async_sharded_save=True)
        assert request is not None
        if name == "b":
            request = request._replace(async_fn=_broken)
        queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match="the disk is on fire"):
        queue.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]


def _broken(*_: Any) -> None:
    raise OSError("the disk is on fire")


def test_what_cannot_go_to_a_process_is_said_to() -> None:
    """A request with a local function says that a process cannot take it, and what can."""
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(lambda: None, (), []))
    with pytest.raises(CheckpointingException, match="persistent=False"):
        queue.close()


def test_staging_copies_and_uses_its_memory_again() -> None:
    """Staged tensors keep their values when the originals change; the next save gets the same memory."""
    release_memory()
    values = torch.arange(12.0).reshape(3, 4)
    staged = stage(_Work(values.t(), values[1], torch.tensor(True), torch.zeros(0, dtype=torch.float8_e4m3fn)))
    expected = [values.t().clone(), values[1].clone(), torch.tensor(True), torch.zeros(0, dtype=torch.float8_e4m3fn)]
    values.zero_()
    with staged.opened() as work:
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
        with staged.opened() as work:
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


def test_replicas_that_are_not_written_are_not_staged(tmp_path: Path) -> None:
    """Only what this rank writes is copied."""
    tensor = torch.ones(1000)
    shards = {
        "mine": ShardedTensor.from_rank_offsets("mine", tensor),
        "copy": ShardedTensor.from_rank_offsets("mine", tensor, replica_id=1),
    }
    request = dc.save(shards, tmp_path / "c", async_sharded_save=True)
    assert request is not None
    assert len(request.preload_fn.__self__.prepared.work.tensors) == 1  # type: ignore[union-attr]
    request.execute_sync()


def test_a_request_counts_as_written_when_its_callback_has_run() -> None:
    """Finalize functions find what written_fn has noted, however slow that is."""
    seen: list[str] = []

    def written(_: Future[Any]) -> None:
        time.sleep(0.2)
        seen.append("written")

    for persistent in (False, True):
        seen.clear()
        with AsyncCallsQueue(persistent) as queue:
            request = AsyncRequest(None, (), [lambda: seen.append("finalized")], written_fn=written)
            queue.schedule_async_request(request)
            while not queue.maybe_finalize_async_calls():
                time.sleep(0.001)
        assert seen == ["written", "finalized"]


def test_an_error_in_the_callback_is_raised() -> None:
    """A written_fn that fails makes the save fail: it is not only logged."""
    failures: list[BaseException] = []
    queue = AsyncCallsQueue()
    request = AsyncRequest(None, (), [], written_fn=lambda _: 1 / 0, failed_fn=failures.append)  # type: ignore[arg-type, return-value]
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match="ZeroDivisionError"):
        queue.close()
    assert len(failures) == 1


def test_an_interrupted_schedule_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while a request is staged goes through, and leaves no staging directory."""
    request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True)
    assert request is not None
    with AsyncCallsQueue() as queue, pytest.raises(KeyboardInterrupt):
        queue.schedule_async_request(request._replace(preload_fn=_interrupted))
    assert not list(tmp_path.iterdir())


def _interrupted() -> None:
    raise KeyboardInterrupt


def test_a_request_is_scheduled_once(tmp_path: Path) -> None:
    """The second scheduling of a request is refused by a clear error; the first is not disturbed."""
    request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True)
    assert request is not None
    queue = AsyncCallsQueue()
    queue.schedule_async_request(request)
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointingException, match="has been scheduled before"):
        queue.close()
    jobs.check(str(tmp_path / "c"), 1.0)


def test_content_metadata_is_that_of_the_save(tmp_path: Path) -> None:
    """What describes the content may change as soon as the save is planned, wherever it is stored."""
    content: dict[str, Any] = {"layers": [1, 2]}
    request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True, content_metadata=content)
    assert request is not None
    content["layers"].append(3)
    request.execute_sync()
    assert dc.load_content_metadata(tmp_path / "c") == {"layers": [1, 2]}
    assert dc.load_common_state_dict(tmp_path / "c")["content_metadata"] == {"layers": [1, 2]}


@pytest.mark.parametrize("persistent", [False, True], ids=["thread", "process"])
def test_staging_without_files_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, persistent: bool) -> None:
    """A Python without memfd_create stages in files that have no name: nothing is left of them."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    release_memory()
    jobs.one_save(str(tmp_path / "c"), persistent)
    assert not list(folder.iterdir())
    release_memory()


def test_staged_memory_is_not_shared_with_forks() -> None:
    """A fork of a process that has staged before gets memory of its own: neither sees what the other stages."""
    program = """
        import os, torch
        from shardckpt.background.staging import stage
        class Work:
            def __init__(self, value): self.tensors, self.keys = [torch.full((1000,), value)], ["key"]
        stage(Work(1.0)).release()
        ours = stage(Work(2.0))
        ours.release()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            staged = stage(Work(3.0))
            os.write(writer, staged.path.encode())
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert os.read(reader, 100).decode() != ours.path
        again = stage(Work(4.0))
        assert again.path == ours.path
        with again.opened() as work:
            assert work.tensors[0].eq(4).all()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_torchs_own_quantized_dtypes_are_refused(tmp_path: Path) -> None:
    """Their scales lie beside their memory: neither way to save stores the integers without them."""
    shard = ShardedTensor.from_rank_offsets("w", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
    with pytest.raises(ShardingError, match=r"'w'.*qint8.*dequantized"):
        dc.save({"w": shard}, tmp_path / "c")
    with pytest.raises(ShardingError, match=r"'w'.*qint8.*dequantized"), AsyncCallsQueue() as queue:  # noqa: PT012
        request = dc.save({"w": shard}, tmp_path / "c", async_sharded_save=True)
        assert request is not None
        queue.schedule_async_request(request)
        queue.maybe_finalize_async_calls(blocking=True)
    assert not list(tmp_path.iterdir())
