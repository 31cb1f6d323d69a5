"""Megatron-Core: every rank has every rank's shards, and rank 0 checks them; its plans are DCP's."""

from __future__ import annotations

import pickle
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.validation import validate_sharding_integrity

import benchmarks.adapters.megatron  # noqa: F401 - lets it run without an accelerator
from benchmarks.simulation.figures import COLUMNS, ROWS, Figures


def simulate(ranks: int, shards: int, full: int, folder: str) -> Figures:  # noqa: ARG001 - nothing is written
    """Validate ``ranks`` ranks with ``shards`` shards each."""
    figures = Figures()
    torch.set_num_threads(1)
    sent = [pickle.dumps(_shards(rank, ranks, shards)) for rank in range(ranks)]
    figures.received("validation", sum(map(len, sent)))
    figures.sent(f"validation of {full:,} shards a rank", len(pickle.dumps(_shards(ranks - 1, ranks, full))))
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{Path(store, 'store')}", rank=0, world_size=1)
        with figures.cpu("validation: CPU of rank 0"):
            validate_sharding_integrity([pickle.loads(part) for part in sent])  # noqa: S301 - our own
        dist.destroy_process_group()
    figures.peak()
    return figures


def _shards(rank: int, ranks: int, count: int) -> list[ShardedTensor]:
    data = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta")
    return [
        ShardedTensor.from_rank_offsets(f"layers.{n}.weight", data, (0, rank, ranks)).without_data()
        for n in range(count)
    ]


__all__ = ["simulate"]
