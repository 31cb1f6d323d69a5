from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.background import queue as queues
from shardckpt.distributed import Comm
from shardckpt.errors import CheckpointingException
from tests.background import jobs
from tests.distributed.long_wait import nothing_said_before

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardckpt.distributed.long_wait import LongWait

__all__ = ["nothing_said_before"]  # fixtures


@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_closing_with_abort_leaves_nothing(tmp_path: Path, persistent: bool) -> None:
    """Requests that are given up are absent, and so are their staging directories."""
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


def _broken_within(tensor: torch.Tensor) -> None:
    try:
        _broken(tensor)
    except Exception as exc:
        raise RuntimeError("the disk is on fire") from exc


@pytest.mark.parametrize("fails", [_broken, _broken_within])
@pytest.mark.parametrize("persistent", [False, pytest.param(True, marks=pytest.mark.ci)])
def test_a_request_that_fails_frees_its_tensors(persistent: bool, fails: Callable[[torch.Tensor], None]) -> None:
    """The tensors of a request that fails are freed without a garbage collection, while its error is kept."""
    staged = torch.ones(3)
    watched = weakref.ref(staged)
    queue = AsyncCallsQueue(persistent)
    gc.disable()
    try:
        queue.schedule_async_request(AsyncRequest(fails, (staged,), []))
        del staged
        with pytest.raises(Exception, match="the disk is on fire"):
            queue.maybe_finalize_async_calls(blocking=True)
        queue.close()
        assert watched() is None
    finally:
        gc.enable()


def test_an_error_in_the_callback_is_raised() -> None:
    """A written_fn that fails makes the save fail: it is not only logged."""
    failures: list[BaseException] = []

    def note(error: BaseException) -> BaseException:
        failures.append(error)
        return error

    queue = AsyncCallsQueue()
    request = AsyncRequest(None, (), [], written_fn=lambda _: 1 / 0, failed_fn=note)  # type: ignore[arg-type, return-value]
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


@pytest.mark.parametrize("own", [True, False], ids=["others write", "all write"])
def test_a_wait_for_what_other_ranks_write_is_reported(
    own: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that has written, and waits for the others, says so once; where it writes itself, that is reported."""
    clock = SimpleNamespace(now=0.0)

    class Others(Comm):
        members = (0, 1)

        def largest(self, *values: int) -> list[int]:
            number, oldest, _, broken, over = values
            return [number, oldest, clock.now < 60, broken, over]

        def begin_wait(self, phase: str, started: float) -> LongWait:
            assert own
            return super().begin_wait(phase, started)

    def wait(_: Any, seconds: float) -> None:
        clock.now += seconds

    monkeypatch.setattr(queues, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(queues, "wait", wait)
    call = queues._Call(AsyncRequest(None, (), [], name="runs/step_100"), queues.Future())
    if own:
        call.future.set_result(None)
    assert queues._is_written(call, Others(alone=True), blocking=True, deadline=None)
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(" in ")[0] for text in said] == ["shardckpt: rank 0 has waited for 10 s"] * own
    assert all("(its part of runs/step_100 is written), for rank 1, which" in text for text in said)
