"""How many bytes ranks of the training script read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from shardckpt import dist_checkpointing
from shardckpt.demo import train
from shardckpt.demo.model import ByteTransformer, feed_forward
from shardckpt.manager import CheckpointConfig, CheckpointManager
from tests.demo.train import read_reports

if TYPE_CHECKING:
    from tests.ranks import Ranks

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="counts the bytes read in /proc")


def _read_so_far() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def _bytes_of_a_load(folder: Path) -> tuple[int, int]:
    """Bytes of this rank's parameters, and bytes that it reads to load them and their optimizer state."""
    model = ByteTransformer(feed_forward)
    if dist.is_initialized():
        train.shard(model, 0)
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointConfig(folder=str(folder / "checkpoints"), load_only=True)
    dist_checkpointing.get_default_load_sharded_strategy(folder / "checkpoints" / "step-2")  # imports outside the count
    before = _read_so_far()
    with CheckpointManager(config, {"model": model, "optimizer": optimizer}) as manager:
        assert manager.load()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    return sum(p.numel() * p.element_size() for p in local), _read_so_far() - before


@linux_only
def test_ranks_read_little_more_than_they_need(ranks: Ranks, tmp_path: Path) -> None:
    """What each of 2 ranks reads is a little more than its own shards: they do not read the checkpoint twice."""
    ranks.run(4, read_reports, tmp_path, "--steps=2")
    ranks.run(2, _bytes_of_a_load, tmp_path)  # imports
    sizes = ranks.run(2, _bytes_of_a_load, tmp_path)
    assert all(3 * own <= read for own, read in sizes)  # parameters, and two moments of each
    assert sum(read for _, read in sizes) < 1.5 * 3 * sum(own for own, _ in sizes)
