from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

import shardckpt
from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue
from shardckpt.background import saving
from shardckpt.distributed import Comm
from shardckpt.distributed.long_wait import LongWait
from shardckpt.engine import long_phase
from shardckpt.engine.long_phase import LongPhase
from shardckpt.engine.operation import Operation
from shardckpt.plugins import Event, get_plugin_manager
from tests.background import jobs
from tests.clock import Clock
from tests.distributed.long_wait import nothing_said_before
from tests.plugged import registered

if TYPE_CHECKING:
    import logging
    from pathlib import Path

__all__ = ["nothing_said_before"]  # fixtures


@pytest.fixture(autouse=True)
def watch(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A watch of its own, without a thread, and its clock."""
    clock = Clock()
    watch = long_phase._Watch()
    watch._thread = threading.current_thread()
    monkeypatch.setattr(long_phase, "_watch", watch)
    monkeypatch.setattr(long_phase, "_clock", lambda: clock.now)
    return clock


@pytest.fixture
def operation(tmp_path: Path) -> Operation:
    """A save of one rank."""
    return Operation("save", tmp_path / "step_100", Comm(alone=True), get_plugin_manager())


def _look(clock: Clock, seconds: float) -> None:
    """Let so many seconds pass, and look at the phases."""
    clock.now += seconds
    long_phase._watch.report(clock.now)


def _args(record: logging.LogRecord) -> tuple[Any, ...]:
    assert isinstance(record.args, tuple)
    return record.args


def test_a_phase_is_reported_once_after_a_minute(
    operation: Operation, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """While a phase goes on it is reported with operation, directory, phase, seconds and rank, and not again."""
    with operation.collective_span(), operation.local_phase("writing"):
        _look(watch, 59.9)
        assert not caplog.records
        _look(watch, 0.1)
        _look(watch, 600)
    _look(watch, 600)
    (record,) = caplog.records
    expected = f"save of {operation.directory} has been in 'writing' for 60 s on rank 0, and has not ended"
    assert expected in record.getMessage()


def test_a_phase_that_is_always_long_is_not_reported_each_time(
    operation: Operation, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """The next report of a phase of the same name comes after twice as long."""
    for seconds in (70, 70, 130, 130, 250):
        with operation.local_phase("writing"):
            _look(watch, seconds)
    assert [_args(record)[3] for record in caplog.records] == [70, 130, 250]


def test_the_innermost_phase_is_reported_and_the_outer_one_counts_anew(
    operation: Operation, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """What a phase within another took is no time of the other; between phases that of the Comm is named."""
    with operation.collective_span():
        for _ in range(3):
            with operation.local_phase("reading shards"):
                watch.now += 50
            _look(watch, 50)
        assert not caplog.records
        with operation.comm.local_phase("describing shards"):
            _look(watch, 10)
    assert [_args(record)[2:4] for record in caplog.records] == [("describing shards", 60)]


def test_bytes_that_are_done_are_no_hang(operation: Operation, watch: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Where progress is counted, a phase is reported once no byte was done for a minute."""
    with operation.local_phase("writing"):
        operation._progress = progress = _Progress()  # type: ignore[assignment]
        for _ in range(5):
            progress.last_added = watch.now
            _look(watch, 59)
        assert not caplog.records
        _look(watch, 1)
    assert [_args(record)[3] for record in caplog.records] == [296]


class _Progress:
    last_added = 0.0


def test_a_rank_that_waits_for_others_says_so_by_one_line(
    operation: Operation, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that waits in a collective is left to the report of the wait, and its phase counts on from its end."""
    with operation.local_phase("committing"):
        wait = LongWait(0.0, 0, range(2), "committing")
        _look(watch, 600)
        wait.end()
        _look(watch, 59)
        assert not caplog.records
        _look(watch, 1)
    assert len(caplog.records) == 1


def test_a_background_save_is_reported_while_it_writes(
    tmp_path: Path, watch: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writing is reported although the program does other things; a save that waits to be finalized is not."""
    may_write, write = threading.Event(), saving._write
    monkeypatch.setattr(saving, "_write", lambda *args: may_write.wait() and write(*args))
    request = dc.save(jobs.state(1.0), tmp_path / "c", async_sharded_save=True)
    _look(watch, 600)
    assert not caplog.records
    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(request)
        wait = LongWait(0.0, 0, range(2), "")  # of the program, in another call
        _look(watch, 60)
        wait.end()
        may_write.set()
        for call in queue._calls:
            call.future.result()
        _look(watch, 600)
    assert [_args(record)[:4] for record in caplog.records] == [("save", tmp_path / "c", "writing", 60)]


def test_a_listener_that_takes_long_is_reported_as_such(
    tmp_path: Path, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin that does not return from an event is named by one line, and not by the phase that it was told of."""

    class Slow:
        @shardckpt.hookimpl
        def shardckpt_event(self, event: Event) -> None:
            if (event.phase, event.state) == ("writing", "start"):
                _look(watch, 70 if event.directory.endswith("False") else 130)

    with registered(Slow()):
        for background in (False, True):
            request = dc.save(jobs.state(1.0), tmp_path / str(background), async_sharded_save=background)
            if request is not None:
                request.execute_sync()
    name = "the shardckpt_event of plugins"
    assert [_args(record)[2:4] for record in caplog.records] == [(name, 70), (name, 130)]


def test_an_interrupted_phase_is_forgotten(
    operation: Operation, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """After Ctrl-C in a phase nothing is in progress."""
    with pytest.raises(KeyboardInterrupt), operation.collective_span(), operation.local_phase("writing"):
        raise KeyboardInterrupt
    _look(watch, 600)
    assert not caplog.records


def test_a_fork_forgets_what_its_parent_does(
    operation: Operation, watch: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork's child reports no phase of its parent, whose end it does not see; but those of its own."""
    with operation.local_phase("writing"):
        long_phase._reset_after_fork()
        long_phase._watch._thread = threading.current_thread()
        own = LongPhase(operation, "committing")
        _look(watch, 60)
        own.end()
    assert [_args(record)[2] for record in caplog.records] == ["committing"]


def test_the_thread_ends_with_the_last_phase(
    operation: Operation, watch: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One thread looks at all phases, reports what is long, and ends when there is none; a later phase starts one."""
    monkeypatch.setattr(long_phase, "_ROUND", 0.0)
    monkeypatch.setattr(long_phase, "_watch", watching := long_phase._Watch())
    for number in (1, 2):
        outer, inner = (LongPhase(operation, f"{name} {number}") for name in ("outer", "inner"))
        thread = watching._thread
        assert thread is not None
        watch.now += 60
        while len(caplog.records) < number:  # the limit of the test ends it
            pass
        outer.end()
        inner.end()
        thread.join()
        assert watching._thread is None
    assert [_args(record)[2] for record in caplog.records] == ["inner 1", "inner 2"]
