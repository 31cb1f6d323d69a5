"""Saving: every rank writes its shards, the main rank the index."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.mapping import ShardedObject, ShardedTensor, is_main_replica
from shardckpt.planning import part_view, shard_parts
from shardckpt.strategy import SaveStrategy
from shardckpt_npy.files import COMMON, INDEX, write_array, write_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shardckpt.mapping import CommonStateDict, ShardedBase
    from shardckpt.strategy import SaveContext


class NpySaveStrategy(SaveStrategy):
    """Writes (npy, 1)."""

    backend = "npy"
    version = 1
    reader = "shardckpt-npy 1.0"
    writes = "a .npy file for every shard, objects as JSON"

    def save(self, shards: Sequence[ShardedBase], common: CommonStateDict, context: SaveContext) -> None:
        """Write this rank's shards, and on the main rank what names those of all."""
        with context.comm.collective_phase("writing .npy files"):
            stored = [shard for shard in shards if is_main_replica(shard.replica_id)]
            entries = [entry for number, shard in enumerate(stored) for entry in _entries(shard, number, context)]
            context.writer.record_shards(stored)
        everyone = context.comm.gather(entries)
        with context.comm.collective_phase("writing the index"):
            if context.comm.is_main:
                write_json(context.writer, INDEX, [entry for entries in everyone for entry in entries])
                write_json(context.writer, COMMON, common)


def _entries(shard: ShardedBase, number: int, context: SaveContext) -> Iterator[dict[str, Any]]:
    """The index's entries for a shard, its files written."""
    if isinstance(shard, ShardedObject):
        yield {"key": shard.unique_key, "value": shard.data}
    elif isinstance(shard, ShardedTensor):
        for piece, part in enumerate(shard_parts(shard)):  # several where the shard is a flattened one
            file = f"shard_{context.comm.rank}_{number}_{piece}.npy"
            write_array(context.writer, file, part_view(shard, part))
            place = {"shape": [*shard.global_shape], "offset": [*part.box.offset], "extent": [*part.box.shape]}
            yield {"key": shard.key, **place, "file": file}
