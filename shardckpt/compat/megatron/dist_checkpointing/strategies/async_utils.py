"""megatron.core.dist_checkpointing.strategies.async_utils."""

from __future__ import annotations

from shardckpt.async_save import AsyncCaller, AsyncCallsQueue, AsyncRequest, PersistentAsyncCaller, TemporalAsyncCaller
from shardckpt.compat.megatron.refusals import make_refusing_getattr
from shardckpt.engine.gc_pause import pause_gc as _disable_gc

REFUSED = {
    "_ActiveAsyncRequest": "AsyncCallsQueue.get_num_unfinalized_calls() counts what is scheduled",
    "DistributedAsyncCaller": "Megatron 0.9's name of TemporalAsyncCaller",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = [
    "AsyncCaller",
    "AsyncCallsQueue",
    "AsyncRequest",
    "PersistentAsyncCaller",
    "TemporalAsyncCaller",
    "_disable_gc",
]
