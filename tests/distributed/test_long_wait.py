from __future__ import annotations

import io
import re
import time
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.distributed import Comm, long_wait
from shardckpt.manager import CheckpointConfig, CheckpointManager
from shardckpt.mapping import ShardedTensor

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.ranks import RankPool

#: What stands for 10 s, and how much longer a rank comes late that another is to wait for.
_SHORT, _LATE = 0.2, 1.3


@contextmanager
def _short_patience() -> Iterator[None]:
    """Let ranks say that they wait after a moment, and forget what they have said."""
    before = long_wait.NOTICE_AFTER
    long_wait.NOTICE_AFTER = _SHORT
    try:
        yield
    finally:
        long_wait.NOTICE_AFTER = before
        long_wait._next_notice.clear()


def _stores_keys() -> int:
    """Number of keys that all ranks have written to the job's store."""
    store: Any = dist.distributed_c10d._get_default_store()
    return int(store.num_keys())


def _calls_late(late: int, call: str, folder: str) -> tuple[str, int, Any]:
    """Call a function, on one rank late; what this rank said on stderr, keys added to the store, the result."""
    torch.manual_seed(0)  # the same on all ranks
    with CheckpointManager(CheckpointConfig(folder=folder), {"model": torch.nn.Linear(2, 2)}) as manager:
        manager.save(3, force=True)
        shard = ShardedTensor.from_rank_offsets("a", torch.ones(2), replica_id=dist.get_rank())
        functions = {"steps": manager.steps, "save": lambda: dc.save({"a": shard}, f"{folder}/dc")}
        dist.barrier()
        before = _stores_keys()
        with _short_patience(), redirect_stderr(io.StringIO()) as said:
            if dist.get_rank() == late:
                time.sleep(_LATE)
            result = functions[call]()
        return said.getvalue(), _stores_keys() - before, result


def test_a_rank_that_waits_names_itself_the_call_and_who_is_missing(ranks: RankPool, tmp_path: Path) -> None:
    """`steps()` on one rank says which rank waits for which, in which call of which line, and goes on."""
    (said, _, found), (_, _, also) = ranks.run(2, _calls_late, 1, "steps", str(tmp_path / "run"))
    assert re.match(
        r"shardckpt: rank 0 has waited for \d+ s in CheckpointManager\.steps\(\), called at .*test_long_wait\.py:\d+, "
        r"for rank 1, which has not called it, or is still busy in it\. It is collective",
        said,
    ), said
    assert found == also == [3]


def test_every_rank_that_waits_says_so_and_writes_nothing_to_the_store(ranks: RankPool, tmp_path: Path) -> None:
    """Of three ranks two wait and say so; the store of the group has no key more than before."""
    results = ranks.run(3, _calls_late, 2, "save", str(tmp_path / "run"))
    assert [added for _, added, _ in results] == [0, 0, 0]
    for rank, others in ((0, "1, 2"), (1, "0, 2")):
        first = results[rank][0].partition("\n")[0]
        assert f"rank {rank} has waited" in first
        assert " in save(), called at " in first
        assert f"one or more of ranks {others}: they have not called it" in first


def _breaks_logging() -> list[int]:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise ValueError("I/O operation on closed file")

    with _short_patience(), redirect_stderr(Broken()):
        if dist.get_rank() == 1:
            time.sleep(_LATE)
        return Comm().all_gather(dist.get_rank())


def test_a_broken_stderr_does_not_fail_the_collective(ranks: RankPool) -> None:
    """A rank that cannot say that it waits goes on nevertheless."""
    assert ranks.run(2, _breaks_logging) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(2, "rank 1, which"), (4, "one or more of ranks 1, 2, 3: "), (1000, "one or more of the other 999 ranks: ")],
)
def test_many_ranks_are_counted(
    count: int, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A few ranks are named, more are counted, and the wait is reported after 10 s, not before, and once."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(long_wait, "_next_notice", {})
    waiting = long_wait.LongWait(100.0, range(count), "planning")
    waiting.report_once(109.9)
    assert not caplog.records
    waiting.report_once(110.0)
    waiting.report_once(130.0)
    (record,) = caplog.records
    assert expected in record.getMessage()
    assert "rank 0 has waited for 10 s" in record.getMessage()
    assert "(planning), for" in record.getMessage()


def test_a_call_that_always_waits_is_not_said_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next notice about a call comes after twice as long: only what is unusual is news."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(long_wait, "_next_notice", {})
    for number, waited in enumerate((15, 15, 15, 25, 25, 45)):
        begun = 1000.0 * number
        waiting = long_wait.LongWait(begun, range(2), "")
        for second in range(waited):
            waiting.report_once(begun + second)
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == [10.0, 20.0, 40.0]
