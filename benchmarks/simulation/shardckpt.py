"""shardckpt: what a save asks of every rank and of the main one, and what it takes to open a checkpoint."""

from __future__ import annotations

import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.simulation.figures import COLUMNS, ROWS, Figures
from shardckpt import dist_checkpointing
from shardckpt.mapping import ShardedTensor
from shardckpt.validation import validate_shards
from shardckpt_torch_dist import ShardedSavePlanner
from shardckpt_torch_dist.plan_cache import PlanCache

if TYPE_CHECKING:
    from collections.abc import Iterator


class Recorder:
    """Stands for the Comm of one of many ranks, which run one after the other, the main one last.

    It has the primitives that validation and planning use; a new one that they come to use is to be added here.
    """

    def __init__(self, rank: int, world_size: int, sent: list[list[bytes]]) -> None:
        self.rank, self.world_size = rank, world_size
        self.is_main = rank == 0
        self._sent = sent
        self._calls = 0

    @contextmanager
    def phase(self, _: str) -> Iterator[None]:
        """A step."""
        yield

    def gather(self, value: Any) -> list[Any]:
        """The main rank has what all have sent, in the order of calls."""
        self._sent[self.rank].append(pickle.dumps(value))
        self._calls += 1
        return [pickle.loads(sent[self._calls - 1]) for sent in self._sent] if self.is_main else []  # noqa: S301 - its own

    def largest(self, *values: float) -> list[float]:
        """A few numbers, which are the same on every rank here."""
        return list(values)


def simulate(ranks: int, shards: int, full: int, folder: str) -> Figures:
    """Validate and plan for ``ranks`` ranks with ``shards`` shards each, and open a checkpoint of as many chunks.

    Args:
        ranks: How many.
        shards: Of each.
        full: Shards of a rank whose validation traffic is measured, whatever ``shards``.
        folder: Where a checkpoint of all chunks is saved by this process.
    """
    figures = Figures()
    torch.set_num_threads(1)
    everyone = [_shards(rank, ranks, shards) for rank in range(ranks)]
    _validate(figures, everyone)
    sent: list[list[bytes]] = [[] for _ in range(ranks)]
    validate_shards(_shards(ranks - 1, ranks, full), Recorder(ranks - 1, ranks, sent))  # type: ignore[arg-type]
    figures.sent(f"validation of {full:,} shards a rank", sum(map(len, sent[-1])))
    _plan(figures, everyone)
    figures.peak()
    _open(figures, everyone, Path(folder))
    return figures


def _validate(figures: Figures, everyone: list[list[ShardedTensor]]) -> None:
    sent: list[list[bytes]] = [[] for _ in everyone]
    for rank in range(len(everyone) - 1, 0, -1):
        validate_shards(everyone[rank], Recorder(rank, len(everyone), sent))  # type: ignore[arg-type]
    with figures.cpu("validation: CPU of rank 0"):
        validate_shards(everyone[0], Recorder(0, len(everyone), sent))  # type: ignore[arg-type]
    figures.received("validation", sum(len(part) for parts in sent for part in parts))


def _plan(figures: Figures, everyone: list[list[ShardedTensor]]) -> None:
    sent: list[list[bytes]] = [[] for _ in everyone]
    for rank in range(len(everyone) - 1, 0, -1):
        _plan_rank(everyone[rank], Recorder(rank, len(everyone), sent))
    with figures.cpu("planning: CPU of rank 0"):
        _plan_rank(everyone[0], Recorder(0, len(everyone), sent))
    figures.sent("planning", sum(map(len, sent[-1])))
    figures.received("planning", sum(len(part) for parts in sent for part in parts))


def _plan_rank(shards: list[ShardedTensor], recorder: Recorder) -> None:
    planner = ShardedSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({shard.key: shard for shard in shards}, is_coordinator=recorder.is_main)
    PlanCache(reuse=False).global_plan(planner, planner.create_local_plan(), recorder)  # type: ignore[arg-type]


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


__all__ = ["Recorder", "simulate"]
