"""Saves behind the training: ``dist_checkpointing.save(..., async_sharded_save=True)`` plans, a queue writes."""

from __future__ import annotations

from shardckpt.background import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
    PersistentAsyncCaller,
    TemporalAsyncCaller,
    release_memory,
)

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
    "release_memory",
]
