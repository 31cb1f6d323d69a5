"""Saves in the background: ``dist_checkpointing.save(..., async_sharded_save=True)`` plans, and a queue writes.

Example:
    ::

        queue = AsyncCallsQueue()
        for step in range(1000):
            train(model)
            if step % 100 == 0:
                request = dist_checkpointing.save(state_dict, f"step-{step}", async_sharded_save=True)
                queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls()  # collective: commits the saves that all ranks have written
        queue.close()  # collective: waits for the last save
"""

from __future__ import annotations

from shardckpt.background.callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller
from shardckpt.background.queue import AsyncCallsQueue
from shardckpt.background.request import AsyncRequest
from shardckpt.background.saving import release_memory

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
    "release_memory",
]
