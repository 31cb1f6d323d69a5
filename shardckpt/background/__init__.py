"""Background saves: staging, the thread or process that writes, and the queue that finalizes."""

from shardckpt.background.callers import AsyncCaller, PersistentAsyncCaller, TemporalAsyncCaller
from shardckpt.background.queue import AsyncCallsQueue
from shardckpt.background.request import AsyncRequest
from shardckpt.background.saving import release_memory, request_save

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
    "release_memory",
    "request_save",
]
