"""shardckpt: what a save asks of every rank and of the main one, and what it takes to open a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from benchmarks.simulation.figures import COLUMNS, ROWS, Figures
from benchmarks.simulation.replay import Replay
from benchmarks.simulation.traffic import count_record_traffic
from shardckpt import dist_checkpointing
from shardckpt.mapping import ShardedTensor
from shardckpt.strategy import PlanContext
from shardckpt.validation.sharding import validate_shards
from shardckpt_torch_dist import TorchDistSaveShardedStrategy

#: Chunks of a checkpoint that is really saved, at most.
_STORED = 300_000


def simulate(ranks: int, shards: int, full: int, folder: str) -> Figures:
    """Validate and plan for ``ranks`` ranks with ``shards`` shards each, and open a checkpoint of as many chunks.

    Args:
        ranks: How many.
        shards: Of each.
        full: Shards of a rank whose validation traffic is measured, whatever ``shards``.
        folder: Where a checkpoint of all chunks is saved by this process, unless there are too many.
    """
    figures = Figures()
    torch.set_num_threads(1)
    _validate(figures, ranks, shards)
    _traffic(figures, ranks, full)
    records = count_record_traffic(ranks, full)
    figures.sent(f"file records with {full:,} digests a rank", records.sent)
    figures.received(f"file records with {full:,} digests a rank", records.received)
    _plan(figures, ranks, shards)
    figures.peak()
    if ranks * shards <= _STORED:
        _open(figures, [_shards(rank, ranks, shards) for rank in range(ranks)], Path(folder))
    return figures


def _traffic(figures: Figures, ranks: int, full: int) -> None:
    """What validation moves; the number of boxes does not change it, so that two ranks stand for the tensors of all."""
    ends = (0, ranks - 1)
    replay = Replay(ranks)
    replay.run(lambda rank, comm: validate_shards(_shards(ends.index(rank), 2, full) if rank in ends else [], comm))  # type: ignore[arg-type]
    figures.sent(f"validation of {full:,} shards a rank", replay.sent[-1])
    figures.received(f"validation of {full:,} shards a rank", replay.received)


def _validate(figures: Figures, ranks: int, shards: int) -> None:
    replay = Replay(ranks)
    replay.run(lambda rank, comm: validate_shards(_shards(rank, ranks, shards), comm))  # type: ignore[arg-type]
    figures["validation: CPU of rank 0", "s"] = replay.seconds
    figures.received("validation", replay.received)


def _plan(figures: Figures, ranks: int, shards: int) -> None:
    replay = Replay(ranks)

    def plan(rank: int, comm: Any) -> None:
        context = PlanContext(comm=comm, save_id="0" * 32)
        TorchDistSaveShardedStrategy().prepare(_shards(rank, ranks, shards), {}, context)

    replay.run(plan)
    figures["planning: CPU of rank 0", "s"] = replay.seconds
    figures.sent("planning", replay.sent[-1])
    figures.received("planning", replay.received)


def _open(figures: Figures, everyone: list[list[ShardedTensor]], folder: Path) -> None:
    """A checkpoint of all chunks, saved for real by one process."""
    data = torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16)
    for shards in everyone:
        for shard in shards:
            shard.data = data
    try:
        dist_checkpointing.save({"all": everyone}, folder)
        figures["metadata on disk", "MiB"] = sum(
            path.stat().st_size for path in folder.iterdir() if path.suffix != ".distcp"
        ) / (1 << 20)
        dist_checkpointing.load_tensors_metadata(folder)  # imports what it takes
        with figures.cpu("open metadata: CPU"):
            dist_checkpointing.load_tensors_metadata(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _shards(rank: int, ranks: int, count: int) -> list[ShardedTensor]:
    data = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta")
    return [ShardedTensor.from_rank_offsets(f"layers.{n}.weight", data, (0, rank, ranks)) for n in range(count)]


__all__ = ["simulate"]
