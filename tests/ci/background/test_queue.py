from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from shardckpt.async_save import AsyncCallsQueue, AsyncRequest
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from concurrent.futures import Future


def test_what_cannot_go_to_a_process_is_said_to() -> None:
    """A request with a local function says that a process cannot take it, and what can."""
    queue = AsyncCallsQueue(persistent=True)
    queue.schedule_async_request(AsyncRequest(lambda: None, (), []))
    with pytest.raises(CheckpointingException, match="persistent=False"):
        queue.close()


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
