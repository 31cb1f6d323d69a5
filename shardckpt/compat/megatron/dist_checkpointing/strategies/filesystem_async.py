"""megatron.core.dist_checkpointing.strategies.filesystem_async."""

from __future__ import annotations

from shardckpt.compat.megatron.refusals import QUEUE, make_refusing_getattr

#: The queue for the results of all saves, which Megatron's trainer shuts down: there is none.
_results_queue = None

REFUSED = dict.fromkeys(("FileSystemWriterAsync", "WriteBucket", "get_write_results_queue"), QUEUE)

REFUSED.update(
    {
        "_get_write_results_queue": "the results of a save belong to its own request: no queue is shared",
        "_item_size": "shardckpt.planning.shard_nbytes(shard) counts a shard's bytes",
        "_process_memory": "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss has a process's memory",
        "_split_by_separation_hint": "separation_hint= of TorchDistSaveShardedStrategy divides the files",
        "_split_by_size_and_type": "thread_count= of TorchDistSaveShardedStrategy says how many files a rank writes",
    }
)

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = []
