"""What the ranks of a save send and receive, by phase: bytes are counted, and none of them is stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from benchmarks.simulation.replay import Recorder, Replay
from shardckpt.engine.transaction import INLINE_TABLES, WrittenFiles
from shardckpt.manifest import FileRecord
from shardckpt.mapping import ShardedTensor, is_main_replica
from shardckpt.storage.digest import Segments
from shardckpt.validation import validate_shards
from shardckpt.validation.completeness import GivenShards
from shardckpt.validation.replicas import choose_main_replicas, find_replicas
from shardckpt.validation.sharding import describe_shards

if TYPE_CHECKING:
    from collections.abc import Callable

#: Bytes of a shard: each is a segment of its file, and has a row in the table of digests.
_SHARD_BYTES = 1 << 20


class Traffic(NamedTuple):
    """The most bytes that a rank sends in a phase, and that one receives."""

    sent: int
    received: int


def count_traffic(world_size: int, shards: int, key_sets: int = 1, replicated: int = 0) -> dict[str, Traffic]:
    """Count what the core of a save moves between ranks; the strategy's plan is its own.

    Args:
        world_size: Number of ranks.
        shards: Shards of each rank.
        key_sets: How many sets of keys there are, as of pipeline stages: rank r has set r % key_sets.
        replicated: How many of the shards every rank with the same set has a copy of.

    Returns:
        The bytes by phase, in the order of a save.
    """
    everyone = [_shards(rank, world_size, shards, key_sets, replicated) for rank in range(world_size)]

    def find(rank: int, comm: Any) -> None:
        found = find_replicas(everyone[rank], comm)
        everyone[rank] = choose_main_replicas(everyone[rank], comm, compare=False, replicas=found)  # type: ignore[assignment]

    phases: dict[str, Callable[[int, Any], Any]] = {
        "replicas": find,
        "validation": lambda rank, comm: validate_shards(everyone[rank], comm),
        "recorded shards": lambda rank, comm: _compare(everyone[rank], comm),
        "file records": lambda rank, comm: _gather_records(rank, shards, comm),
    }
    return {name: _count(world_size, function) for name, function in phases.items()}


def count_record_traffic(world_size: int, segments: int) -> Traffic:
    """Count what the file records of ranks move that have written so many segments each."""
    return _count(world_size, lambda rank, comm: _gather_records(rank, segments, comm))


def _count(world_size: int, function: Callable[[int, Recorder], Any]) -> Traffic:
    replay = Replay(world_size)
    replay.run(function)
    return Traffic(max(replay.sent), max(replay.received_by))


def _compare(shards: list[ShardedTensor], comm: Any) -> None:
    """What a save does when the strategy has recorded each shard once."""
    stored = [shard for shard in shards if is_main_replica(shard.replica_id)]
    GivenShards(describe_shards(shards), None).compare(stored, comm)


def _gather_records(rank: int, segments: int, comm: Any) -> None:
    """What a commit does: gather the records, without their tables if they are many."""
    table = _table(segments)
    name, size = f"__{rank}_0.distcp", segments * _SHARD_BYTES
    file = FileRecord(name=name, size=size, rank=rank, keys=segments, digest=table.root(), segments=table.pack())
    if comm.gather_up_to(INLINE_TABLES, WrittenFiles([file], {})) is None:
        file = file.model_copy(update={"segments": len(table.to_bytes())})
        comm.gather(WrittenFiles([file], {}))


_tables: dict[int, Segments] = {}


def _table(segments: int) -> Segments:
    if segments not in _tables:
        digests = torch.randint(1 << 62, (segments,)).tolist()  # random: digests cannot be compressed
        _tables[segments] = Segments([_SHARD_BYTES] * segments, digests, "xxh3_64")
    return _tables[segments]


def _shards(rank: int, world_size: int, count: int, key_sets: int, replicated: int) -> list[ShardedTensor]:
    data = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    stage = rank % key_sets
    place, parts = rank // key_sets, len(range(stage, world_size, key_sets))
    found = []
    for number in range(count):
        key = f"stage.{stage}.layers.{number}.weight"
        shard = ShardedTensor.from_rank_offsets(key, data, *([] if number < replicated else [(0, place, parts)]))
        shard.replicated = number < replicated
        found.append(shard)
    return found


__all__ = ["Traffic", "count_record_traffic", "count_traffic"]
