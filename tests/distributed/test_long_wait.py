from __future__ import annotations

import io
import logging
import re
import sys
from contextlib import redirect_stderr
from typing import TYPE_CHECKING, Any

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.distributed import Comm, long_wait
from shardckpt.distributed.group_failure import GroupFailure
from shardckpt.distributed.long_wait import LongWait
from shardckpt.errors import CommunicationError
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor
from tests.distributed.long_wait import nothing_said_before
from tests.distributed.simulated import Job, View

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["nothing_said_before"]  # fixtures


class Work:
    """A collective that ends after some seconds of the simulation."""

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._ends = job, job.clock.now + seconds

    def wait(self, timeout: Any) -> None:
        """Wait as torch's work handles do."""
        self._job.clock.sleep(timeout.total_seconds())
        if not self.is_completed():
            raise RuntimeError("Timed out waiting for recv operation to complete")

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return self._job.clock.now >= self._ends


class WaitingComm(Comm):
    """Rank 0 of a simulated job."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._by_gloo, self._clock = True, lambda: job.clock.now
        self._job, self._view = job, View(job, 0)

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the simulated job."""
        return tuple(self._job.ranks)

    def _make_failure(self) -> GroupFailure:
        return GroupFailure(self._view)  # type: ignore[arg-type]

    def wait_for_others(self, seconds: float) -> None:
        """Wait in a collective of that length."""
        self._job.run_each({0: lambda _: self._call(lambda: Work(self._job, seconds))})


def test_a_wait_is_reported_once_after_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """A collective that takes longer says so once; the wait itself goes on, and writes nothing to the group's store."""
    job = Job()
    comm = WaitingComm(job)
    comm.wait_for_others(9.9)
    assert not caplog.records
    with comm.local_phase("planning"):
        comm.wait_for_others(60.0)
    (record,) = caplog.records
    assert "rank 0 has waited for 10 s in" in record.getMessage()
    assert "(planning), for one or more of ranks 1, 2: they have not called it" in record.getMessage()
    assert (job.store.values, job.alive.values) == ({}, {})


def test_a_rank_that_waits_hears_of_a_failure() -> None:
    """It ends its wait with the others' error as soon as one of them has announced it."""
    job = Job()
    comm = WaitingComm(job)
    job.run_each({1: lambda rank: GroupFailure(View(job, rank))._announce()})  # type: ignore[arg-type]
    with pytest.raises(CommunicationError, match="rank 2 did not answer"):
        comm.wait_for_others(60.0)
    assert job.clock.now < 60.0


def test_a_broken_stderr_does_not_fail_the_collective() -> None:
    """A rank that cannot say that it waits goes on nevertheless."""

    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise ValueError("I/O operation on closed file")

    job, handler = Job(), logging.StreamHandler(Broken())
    long_wait.logger.addHandler(handler)
    try:
        with redirect_stderr(Broken()):  # there logging tells of a handler's errors
            WaitingComm(job).wait_for_others(60.0)
    finally:
        long_wait.logger.removeHandler(handler)
    assert job.clock.now == pytest.approx(60.0)


@pytest.fixture
def waiting_for_rank_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every collective of this process be one in which rank 0 of two has waited for 10 s."""

    def wait_in(collective: Any) -> Any:
        def waiting(*args: Any, **kwargs: Any) -> Any:
            LongWait(0.0, 0, range(2), "").report_once(10.0)
            return collective(*args, **kwargs)

        return waiting

    for name in ("_sync", "broadcast"):
        monkeypatch.setattr(Comm, name, wait_in(getattr(Comm, name)))


def test_a_rank_that_waits_names_itself_the_call_and_who_is_missing(
    waiting_for_rank_1: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says which rank waits for which, in which public call of which line of the program, whatever lies between."""
    with CheckpointManager(CheckpointConfig(folder=str(tmp_path / "run")), {"w": torch.nn.Linear(2, 2)}) as manager:
        caplog.clear()
        manager.steps()
    dc.save({"a": ShardedTensor.from_rank_offsets("a", torch.ones(2))}, tmp_path / "dc")
    said = [record.getMessage() for record in caplog.records]
    owner = "CheckpointManager." if sys.version_info >= (3, 11) else ""  # frames of Python 3.10 do not know it
    for call in (f"{owner}steps()", "save()"):
        pattern = (
            rf"shardckpt: rank 0 has waited for 10 s in {re.escape(call)}, called at .*test_long_wait\.py:\d+, "
            r"for rank 1, which has not called it, or is still busy in it\. It is collective"
        )
        assert [text for text in said if re.match(pattern, text)], said


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2, "rank 1, which"), (4, "one or more of ranks 1, 2, 3: "), (1000, "one or more of the other 999 ranks: ")],
)
def test_many_ranks_are_counted(count: int, expected: str, caplog: pytest.LogCaptureFixture) -> None:
    """A few ranks are named, more are counted, and the wait is reported after 10 s, not before, and once."""
    waiting = LongWait(100.0, 0, range(count), "planning")
    waiting.report_once(109.9)
    assert not caplog.records
    waiting.report_once(110.0)
    waiting.report_once(130.0)
    (record,) = caplog.records
    assert expected in record.getMessage()
    assert "rank 0 has waited for 10 s" in record.getMessage()
    assert "(planning), for" in record.getMessage()


def test_a_call_that_always_waits_is_not_said_each_time(caplog: pytest.LogCaptureFixture) -> None:
    """The next notice about a call comes after twice as long: only what is unusual is news."""
    for number, waited in enumerate((15, 15, 15, 25, 25, 45)):
        begun = 1000.0 * number
        waiting = LongWait(begun, 0, range(2), "")
        for second in range(waited):
            waiting.report_once(begun + second)
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [10.0, 20.0, 40.0]
