from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch.distributed as dist

from shardckpt import dist_checkpointing as dc
from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.errors import CheckpointingException
from tests.background import jobs

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from tests.ranks import Ranks


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


def _fail_to_note(_: str) -> list[str]:
    def note(written: Future[Any]) -> None:
        if dist.get_rank() == 1:
            raise OSError(f"no note of {written.result()}")

    seen: list[str] = []

    def fail(error: BaseException) -> BaseException:
        seen.append(str(error))
        return error

    request = AsyncRequest(lambda: 7, (), [lambda: seen.append("finalized")], written_fn=note, failed_fn=fail)
    with pytest.raises(CheckpointingException, match=r"rank 1.*no note of 7"):
        request.execute_sync()
    return seen


def test_a_written_fn_that_fails_in_the_foreground_is_an_error_of_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """As in a queue: no rank finalizes, and each calls its ``failed_fn``."""
    for seen in ranks.run(2, _fail_to_note, str(tmp_path)):
        assert len(seen) == 1
        assert "no note of 7" in seen[0]


def test_the_first_of_two_errors_is_the_one_that_is_raised() -> None:
    """What failed in the writing is not hidden by a ``written_fn`` that fails after it."""
    request = AsyncRequest(lambda: {}["shard"], (), [], written_fn=lambda written: {}["note"])
    with pytest.raises(CheckpointingException, match="KeyError: 'shard'"):
        request.execute_sync()


def test_a_finalize_function_that_fails_after_the_commit_says_so(tmp_path: Path) -> None:
    """Who is told that a background save failed learns whether there is a checkpoint: here there is."""
    request = dc.save(jobs.state(5.0), tmp_path / "c", async_sharded_save=True)
    assert request is not None
    request.add_finalize_fn(lambda: {}["tracker"])
    with pytest.raises(CheckpointingException, match=rf"tracker.*the checkpoint {tmp_path / 'c'} is committed"):
        request.execute_sync()
    jobs.check(str(tmp_path / "c"), 5.0)


def test_what_is_no_request_is_refused() -> None:
    """None, which a synchronous save returns, and other objects are errors that say what a request has."""
    queue = AsyncCallsQueue()
    with pytest.raises(CheckpointingException, match=r"None cannot be scheduled: .*async_sharded_save=True"):
        queue.schedule_async_request(None)
    with pytest.raises(CheckpointingException, match=r"7 cannot be scheduled: a request has async_fn"):
        queue.schedule_async_request(7)  # type: ignore[arg-type]
    assert queue.get_num_unfinalized_calls() == 0


def test_a_request_is_known_by_its_fields() -> None:
    """Another library's request is preloaded, written and finalized as its fields say, and is not changed."""
    seen: list[Any] = []

    class Foreign:
        async_fn = staticmethod(lambda *args, **keywords: seen.append((args, keywords)))
        async_fn_args = ("a", None)
        async_fn_kwargs: ClassVar = {"c": 1}
        finalize_fns: ClassVar = [lambda: seen.append("end")]
        preload_fn = staticmethod(lambda: "b")

    with AsyncCallsQueue() as queue:
        queue.schedule_async_request(Foreign())
    assert seen == [(("a", "b"), {"c": 1}), "end"]
    assert Foreign.async_fn_args == ("a", None)
