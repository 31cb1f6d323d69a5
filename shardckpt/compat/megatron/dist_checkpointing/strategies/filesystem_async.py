"""megatron.core.dist_checkpointing.strategies.filesystem_async."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import QUEUE, make_refusing_getattr

#: What to do instead of Megatron's names that are not here.
REFUSED = {
    "FileSystemWriterAsync": QUEUE,
    "WriteBucket": QUEUE,
    "get_write_results_queue": QUEUE,
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = []
